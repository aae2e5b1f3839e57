"""A real vLLM engine that answers requests on standard input, one JSON object a line, until it is closed.

Run as ``python -m tests.engine.served MODEL CONNECTOR``; CONNECTOR is the extra config of Maru's connector as JSON, or
``null`` for an engine without one. Answers are lines that start with ``RESULT``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Start the engine, say so, serve."""
    from vllm import LLM, SamplingParams

    connector = json.loads(sys.argv[2])
    options: dict[str, Any] = {}
    if connector is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "MaruKVConnector",
            "kv_connector_module_path": "maru_integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": connector,
        }
    llm = LLM(
        model=sys.argv[1],
        max_model_len=2048,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **options,
    )
    print("RESULT " + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("forget"):
            llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], params, use_tqdm=False)
        metrics = {item.name: getattr(item, "value", None) for item in llm.get_metrics()}
        answer = {
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
            "texts": [output.outputs[0].text for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "external": metrics.get("vllm:external_prefix_cache_hits"),
            "seconds": time.perf_counter() - start,
        }
        print("RESULT " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
