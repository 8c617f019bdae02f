"""Memory that a process keeps."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from lit_llm.core.memory import keep_freed_memory

def use():  # 64 MiB, more than glibc keeps by itself
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(2**20) for _ in range(64)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    keep_freed_memory()
use(), use()
print(use() * resource.getpagesize() / 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults():
    def faults(argument: str) -> float:
        """MiB that the kernel had to give again."""
        return float(subprocess.run([sys.executable, "-c", SCRIPT, argument], capture_output=True, check=True).stdout)

    assert faults("keep") < 6 < 50 < faults("default")
