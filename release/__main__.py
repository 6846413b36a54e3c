"""``python -m release``: build both distributions, and put them into dist/ only when :mod:`.check` finds nothing."""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from release.check import disagreement, findings, versions

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Returns the exit status: 1 when something is refused, with a line for each reason."""
    problems = disagreement(versions(ROOT))
    if problem := _build_labextension():
        problems.append(f"the JupyterLab part is not up to date: {problem}")
    with tempfile.TemporaryDirectory() as folder:
        if not problems:
            try:
                problems = _make(Path(folder))
            except RuntimeError as error:
                problems = [str(error)]
    for problem in problems:
        print(f"not released: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _make(folder: Path) -> list[str]:
    """Build in ``folder``, and copy to dist/ unless something is found, which is returned."""
    made = build(ROOT, folder)
    problems = findings(next(file for file in made if file.suffix == ".whl"), ROOT)
    if not problems:
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in made:
            shutil.copy(file, ROOT / "dist")
            print(f"dist/{file.name}  {file.stat().st_size / 1e6:.1f} MB")
    return problems


def build(root: Path, folder: Path, *kinds: str) -> list[Path]:
    """Build ``kinds`` of distributions (default: sdist and wheel) of the checkout ``root`` into ``folder``.

    Raises:
        RuntimeError: with what hatchling said, when it failed.
    """
    targets = [option for kind in kinds or ("sdist", "wheel") for option in ("-t", kind)]
    command = [sys.executable, "-m", "hatchling", "build", *targets, "-d", str(folder)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"hatchling ended with {done.returncode}: {done.stderr.strip()}")
    return sorted(folder.iterdir())


def _build_labextension() -> str:
    """Bring the JupyterLab part up to date; why that could not be done, or nothing. The wheel alone would be built
    with an old one."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "labextension" / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    problem: str = hook.build(ROOT)
    return problem


if __name__ == "__main__":
    sys.exit(main())
