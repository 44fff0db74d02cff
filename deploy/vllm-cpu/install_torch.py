"""Installs torch for the CPU build of vLLM: the small CPU wheel if its index answers, else the default.

The default wheel works as well, but brings about 5 GB of CUDA libraries that nothing here uses.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def cpu_index_answers() -> bool:
    """True if the index of CPU wheels can be read within five seconds."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def main() -> int:
    """Install the version given on the command line, unless it is there already."""
    version = sys.argv[1]
    try:
        if importlib.metadata.version("torch").split("+")[0] == version:
            return 0
    except importlib.metadata.PackageNotFoundError:
        pass
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "install", "--python", sys.executable, "--compile-bytecode", "--quiet"]
    if cpu_index_answers():
        print(f"      CPU wheel from {CPU_INDEX}")
        answer = subprocess.call([*command, f"torch=={version}+cpu", "--index", CPU_INDEX])
        if answer == 0:
            return 0
    print("      default wheel (with CUDA libraries, about 3 GB to download)")
    return subprocess.call([*command, f"torch=={version}"])


if __name__ == "__main__":
    sys.exit(main())
