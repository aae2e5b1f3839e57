"""vLLM's engine core, its worker and our threads under one interpreter lock, also on the CPU: as it is on one GPU."""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class OneProcess(UniProcExecutor):
    """vLLM's own, under another name: asked for by ``uni``, it is replaced on the CPU, where its threads are not bound.

    Give it as ``distributed_executor_backend="benchmarks.one_process.OneProcess"`` with ``OMP_NUM_THREADS`` set.
    """
