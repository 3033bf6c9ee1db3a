"""Becomes conftest.py beside upstream's unpacked tests: which Llama they get, and which models.

Environment: SUITE_LLAMA is "stock", or "install" for ours; SUITE_MODELS is a JSON object, file name on the
hub -> local path.
"""

import json
import os
import sys
import types

import numpy as np

import llamahybrid  # chooses the engine, so it comes before llama_cpp

if os.environ["SUITE_LLAMA"] == "install":
    llamahybrid.install()
models = json.loads(os.environ["SUITE_MODELS"])


def hf_hub_download(repo_id: str, filename: str) -> str:
    """A tiny model of the architecture that the suite would have downloaded."""
    return models[filename]


def log_softmax(x, axis=None):
    """As scipy's; the suite imports it."""
    shifted = x - np.max(x, axis=axis, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


hub = types.ModuleType("huggingface_hub")
hub.hf_hub_download = hf_hub_download
special = types.ModuleType("scipy.special")
special.log_softmax = log_softmax
scipy = types.ModuleType("scipy")
scipy.special = special
sys.modules.update({"huggingface_hub": hub, "scipy": scipy, "scipy.special": special})
