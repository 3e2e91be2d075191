"""Several processes: who they are.

Owns: what relight knows of ranks and world. Must not: import torch when the caller has not.
"""
