"""The demonstration: a real vLLM with a tiny model, real load, and what Stratoscope says about it.

``tiny_model`` makes the model, ``server`` runs vLLM, ``load`` drives it, ``scenario`` says with
what, and ``run`` puts them together behind ``stratoscope demo``. Nothing here is used in production.
"""
