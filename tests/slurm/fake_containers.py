"""Stand-ins for pyxis, enroot and apptainer, as far as a launcher can tell: what of the environment arrives, in which
folder the command starts, which of two values wins. They isolate nothing.

    PATH=$(folder of these):$PATH sbatch ...
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

IMAGE = '{"PATH": "/usr/bin:/bin", "HOME": "/root", "PYTHONPATH": "/of/the/image"}'
"""What the image sets."""
HEAD = f"#!{sys.executable} -IS\nimport os, sys\nimage, here, words = {IMAGE}, dict(os.environ), sys.argv[1:]\n"
OPTIONS = '''
def take(*with_value):
    """Options up to the first word that is none, as (name, value)."""
    taken = []
    while words and words[0].startswith("--"):
        option = words.pop(0)
        name, equals, value = option.partition("=")
        taken.append((name, value if equals else words.pop(0) if name in with_value else ""))
    return taken

def start(environment, folder, words):
    for mount in mounts:
        assert os.path.isdir(mount.split(":")[0]), f"{mount}: no such file or directory"
    os.chdir(folder)
    os.execvpe(words[0], words, environment)
'''
ENROOT = '''
assert words.pop(0) == "start"
options = take("--mount", "--env")
mounts = [value for name, value in options if name == "--mount"]
named = [value for name, value in options if name == "--env"]
assert words.pop(0) == "img"
start({**image, **{name: here.get(name, "") for name in named}}, "/", words)
'''
APPTAINER = '''
assert words.pop(0) == "exec"
options = take("--bind", "--pwd")
mounts = [value for name, value in options if name == "--bind"]
assert words.pop(0) == "img"
prefix = "APPTAINERENV_"
over = {name.removeprefix(prefix): value for name, value in here.items() if name.startswith(prefix)}
start({**here, **image, "LD_LIBRARY_PATH": "/.singularity.d/libs", **over}, dict(options)["--pwd"], words)
'''
SRUN = '''
if words[0] == "-in-pyxis":
    folder, named, mounts = words[1], words[2].split(","), words[3].split(",")
    start({**here, **{name: value for name, value in image.items() if name not in named}}, folder, words[4:])
options = take()
mine = {name: value for name, value in options if name.startswith("--container-")}
others = [name + (f"={value}" if value else "") for name, value in options if name not in mine]
if mine:
    assert mine["--container-image"] == "img"
    words = [sys.argv[0], "-in-pyxis", mine["--container-workdir"], mine["--container-env"],
             mine["--container-mounts"], *words]
os.execv(REAL, [REAL, *others, *words])
'''


def install(folder: Path) -> Path:
    """Write `enroot`, `apptainer` and an `srun` with pyxis; returns the folder."""
    folder.mkdir()
    texts = {"enroot": ENROOT, "apptainer": APPTAINER, "srun": f"REAL = {shutil.which('srun')!r}\n{SRUN}"}
    for name, text in texts.items():
        (folder / name).write_text(HEAD + OPTIONS + text, encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder
