"""The agent: OTLP in, attribution, OTLP and Prometheus out.

``receivers/`` decode what arrives (``otlp.py`` holds the decoders), ``processors/`` and
``exporters/`` are consumers of batches (``component.py``), ``config.py`` reads the YAML file,
``pipeline.py`` wires the parts, ``agent.py`` gives them a life. Knows nothing of vLLM.
"""
