"""The run that the site plays (``docs/recorded.json.gz``): recorded here, made a page of when the site is built.

``python -m docs.recording`` runs the quickstart notebook and keeps what its journal has, without names, addresses and
folders of the machine. mkdocs calls :func:`on_files` and :func:`on_page_markdown`.
"""

import gzip
import sys
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.journal.moments import PastViews
from notebook_cluster.protocol.state import ClusterView, Series
from notebook_cluster.widgets.replay import render_replay

RECORDED = Path(__file__).with_name("recorded.json.gz")
PAGE = "replay.html"


class Recording(msgspec.Struct):
    views: list[ClusterView]
    series: list[Series]
    ended: str


def read() -> Recording:
    """What was recorded."""
    return msgspec.json.decode(gzip.decompress(RECORDED.read_bytes()), type=Recording)


def on_files(files: Any, config: Any) -> Any:
    """A hook of mkdocs: the page is one of the site's files."""
    from mkdocs.structure.files import File

    found = read()
    page = render_replay(PastViews(found.views, True), found.series, found.ended)
    files.append(File.generated(config, PAGE, content=page))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A hook of mkdocs: the first page leads there, in the site alone, for the page is nowhere else."""
    if page.file.src_uri != "index.md":
        return markdown
    row = "| to see it work |"
    if row not in markdown:
        raise ValueError(f"docs/index.md has no row {row!r}, before which the recorded run belongs")
    return markdown.replace(
        row, f"| to watch a run that was recorded | [the quick start, played again]({PAGE}) |\n{row}", 1
    )


def plain(view: ClusterView) -> ClusterView:
    """``view`` without what only the machine is about on which it was recorded."""
    replace = msgspec.structs.replace
    nodes = [replace(node, device_name="cpu" if node.device == "cpu" else node.device_name) for node in view.nodes]
    own = {node.peer for node in view.nodes}
    peers = [
        replace(peer, key="", device="cpu", address="127.0.0.1") for peer in view.peers if peer.name in {*own, "local"}
    ]
    return replace(view, nodes=nodes, peers=peers, directory="", run_log="", kernels={}, invitation="")


def record() -> Recording:
    """Run the quickstart, one training of each kind, and read its journal."""
    import nbformat

    from notebook_cluster.client import find_run, read_past_views, read_run, running_clusters
    from tests.conftest import shared_folders, wait_until
    from tests.ipc_kernels import run_notebook

    notebooks = Path(__file__).parents[1] / "example_notebooks"
    source = (notebooks / "01_quickstart.ipynb").read_text().replace("RUNS = 3", "RUNS = 1")
    with shared_folders() as root:
        run_notebook(nbformat.reads(source, as_version=4), root, timeout=600)
        wait_until(lambda: "quickstart" not in running_clusters(), 120, "the end of the cluster")  # with its kernel
        folder = find_run("quickstart").folder
        run = read_run(folder)
        past = read_past_views(folder, run)
        return Recording([plain(view) for view in past.views], run.curves, run.ended)


if __name__ == "__main__":
    written = gzip.compress(msgspec.json.encode(record()), mtime=0)
    RECORDED.write_bytes(written)
    print(f"{RECORDED}: {len(written):,} bytes", file=sys.stderr)
