"""A real vLLM engine with its core and its worker in processes of their own, and what it says about its plugins.

Run as ``python -m tests.engine.plugged MODEL RUNTIME``. It computes one prompt until it comes from the pool.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Start the engine, ask, tell."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=20,
        distributed_executor_backend="mp",
        kv_transfer_config={
            "kv_connector": "MaruKVConnector",
            "kv_connector_module_path": "maru_integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "maru_kv_chunk_tokens": 64,
                "maru_pool_size": "64M",
                "maru_runtime_dir": sys.argv[2],
                "maru_idle_exit": 2,
                "maru_lookup_timeout": 10,
            },
        },
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    ids = [index * 31 % 512 for index in range(300)]
    cached: list[int] = []
    # On a machine that stands still for half a second a step stores nothing: then the prompt is sent once more.
    while len(cached) < 2 or (not cached[-1] and len(cached) < 4):
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        cached.append(output.num_cached_tokens)
        llm.reset_prefix_cache()
    with open(os.path.join(sys.argv[2], "server.json")) as file:
        server = json.load(file)["pid"]
    print("RESULT " + json.dumps({"cached": cached, "pid": os.getpid(), "server": server}))


if __name__ == "__main__":
    main()
