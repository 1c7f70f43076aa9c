"""README's two commands on a machine that nobody has prepared: `make test-bare`, as root on Linux, with debootstrap.

In a folder it makes the smallest Debian 12 with Python, make and git, and in that root runs `make demo` and `make
test` on a clone of this checkout. pip is as it comes there: no configuration, the public index. PyTorch's index is
one made of files, with the wheel that pip finds here, so that both places of scripts/torch_cpu.py are seen: the first
has no such build, the second has. It shows what each command wrote last, and how long it took.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
PACKAGES = "ca-certificates,python3,python3-venv,make,git"  # what README asks for
CERTIFICATES = Path("/usr/local/share/ca-certificates")  # of this network; without them nothing can be fetched
HOME = Path("home/quartet")
TAIL_LINES = 25
ENVIRONMENT = {
    "HOME": "/root",
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "PIP_CERT": "/etc/ssl/certs/ca-certificates.crt",
}


def make_root(root: Path) -> None:
    """A minimal Debian below `root`, unless there is one."""
    if not (root / "etc/debian_version").exists():
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), MIRROR]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for file in ("/etc/resolv.conf", "/etc/hosts"):
        shutil.copy(file, root / file[1:])
    if CERTIFICATES.is_dir():
        shutil.copytree(CERTIFICATES, root / str(CERTIFICATES)[1:], dirs_exist_ok=True)
        subprocess.run(["chroot", str(root), "update-ca-certificates"], check=True, stdout=subprocess.DEVNULL)


def make_index(root: Path) -> None:
    """Makes an index of files, with torch's CPU build alone."""
    folder = root / "index/torch"
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "scripts"))
    from torch_cpu import attempts

    with tempfile.TemporaryDirectory() as scratch:
        for arguments in attempts(Path(scratch), []):
            fetch = ["pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *arguments]
            command = [sys.executable, "-m", *fetch]
            if subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0:
                break
    links = "".join(f'<a href="{wheel.name}">{wheel.name}</a>\n' for wheel in folder.glob("*.whl"))
    (folder / "index.html").write_text(f"<!DOCTYPE html>\n{links}")


def run_inside(root: Path, command: str, log: Path) -> tuple[int, float]:
    """Runs `command` in the checkout in `root`, with mounts of its own. Returns status and seconds."""
    mounts = [f"mount --rbind /{name} {root}/{name}" for name in ("sys", "dev")]
    mounts += [f"mount -t proc proc {root}/proc", f"mount -t tmpfs tmpfs {root}/dev/shm"]
    enter = " && ".join([*mounts, f"exec chroot {root} bash -c 'cd /{HOME} && exec {command}'"])
    started_s = time.monotonic()
    with log.open("wb") as file:
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "bash", "-c", enter],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return done.returncode, time.monotonic() - started_s


def main() -> None:
    parser = ArgumentParser(description="README's commands in a bare Debian root.")
    parser.add_argument("--root", type=Path, help="a folder for it that is kept; default: a temporary one")
    parser.add_argument("--logs", type=Path, default=Path("bare-logs"), help="a folder for what each command writes")
    parser.add_argument("commands", nargs="*", default=["make demo TORCH_INDEX=/index", "make test TORCH_INDEX=/index"])
    flags = parser.parse_args()
    lacking = [program for program in ("debootstrap", "unshare", "chroot") if not shutil.which(program)]
    if os.geteuid() or lacking:
        sys.exit(f"test-bare needs root and debootstrap; missing: {', '.join(lacking) or 'root'}")
    flags.logs.mkdir(exist_ok=True)
    root = (flags.root or Path(tempfile.mkdtemp(prefix="quartet-bare-"))).resolve()
    try:
        make_root(root)
        make_index(root)
        shutil.rmtree(root / HOME, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(root / HOME)], check=True)
        failed = False
        for number, command in enumerate(flags.commands, 1):
            log = flags.logs / f"{number}.log"
            status, seconds = run_inside(root, command, log)
            failed |= status != 0
            print(f"$ {command}    # status {status}, {seconds:.0f} s, {log}", flush=True)
            print("\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]), flush=True)
    finally:
        if flags.root is None:
            shutil.rmtree(root, ignore_errors=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
