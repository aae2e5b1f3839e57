"""Real servers and fake ones, as the client's tests have them, and mini engines as the connector's have."""

from tests.client.conftest import backend, connect, fake, folder, handler, serve
from tests.vllm.conftest import engine_on, model_folder, vllm_leaves_no_environment

__all__ = ["backend", "connect", "engine_on", "fake", "folder", "handler", "model_folder", "serve"]
__all__ += ["vllm_leaves_no_environment"]
