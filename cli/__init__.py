"""The command ``stratoscope``: one module a subcommand, and the pieces that they share.

``main`` parses and dispatches; ``source`` gets JSON documents from an agent or from files; the
``render_*`` modules turn documents into terminal output. A command prints either text for people
or, with ``--json``, one JSON document.
"""
