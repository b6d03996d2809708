"""In every Python process of `make test-fast`, by PYTHONPATH: an import of Ray, vLLM or Megatron-core fails, and so
does the start of one of Slurm's daemons."""

import os
import sys
from importlib.machinery import ModuleSpec

PACKAGES = ("ray", "vllm", "megatron")
PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "ray", "vllm")
REMEDY = "`make test-fast` starts none: mark the test `heavy`"


class _Refuse:
    """Finds them, as what only looks whether they are there must, and does not load them."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.partition(".")[0] in PACKAGES else None

    def create_module(self, spec):
        raise RuntimeError(f"import of {spec.name}; {REMEDY}")

    def exec_module(self, module):
        """Never comes to this."""


def _started(event, arguments):
    if event == "subprocess.Popen":
        words = arguments[1]
        program = os.path.basename(os.fsdecode(words if isinstance(words, str | bytes | os.PathLike) else words[0]))
        if program in PROGRAMS:
            raise RuntimeError(f"start of {program}; {REMEDY}")


sys.meta_path.insert(0, _Refuse())
sys.addaudithook(_started)
