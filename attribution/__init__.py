"""Attribution: tables of steps and requests in, seconds by layer and cause out.

Pure functions over numpy arrays: no I/O, no clock, no vLLM. Four stages, a module each: segment,
label (a table: :mod:`.taxonomy`), charge, and the matrix over many requests.
"""
