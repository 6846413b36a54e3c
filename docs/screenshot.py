"""Take docs/panel.png: ``make picture``. The quickstart in JupyterLab on three nodes, its panel while the model trains.

Needs the ``test`` extra and the system's Chromium; the two other agents are those of ``make demo``.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

from example_notebooks.demo import AGENTS, CLUSTER, NOTEBOOK, private_jupyter, sharing, stop_clusters, wait_for_peers
from notebook_cluster.client import Cluster, ClusterError
from tests.browser import browser_page, open_notebook, run_all, running_lab

PICTURE = Path(__file__).with_name("panel.png")
JOB = "all-0"
ROUND = 18
"""Of 30: the curves have a shape by then, and the cell still runs."""
PATIENCE = 300.0


def wait_for_round(number: int) -> None:
    """Return when the cluster has committed so many rounds.

    Raises:
        TimeoutError: it has not, after PATIENCE seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            with Cluster.attach(CLUSTER) as cluster:
                while time.monotonic() < deadline:
                    if any(job.name == JOB and job.round >= number for job in cluster.state().jobs):
                        return
                    time.sleep(0.1)
        except ClusterError:
            time.sleep(0.2)  # the notebook has not started it yet
    raise TimeoutError(f"cluster {CLUSTER!r} did not reach round {number} within {PATIENCE:g} s")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="nbc-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        private_jupyter(scratch)
        (scratch / "notebooks").mkdir()
        shutil.copy(NOTEBOOK, scratch / "notebooks")
        with (
            sharing(AGENTS, scratch) as processes,
            running_lab(scratch / "notebooks", environment=dict(os.environ)) as lab,
            browser_page(lab, width=1080, height=1900) as page,
        ):
            wait_for_peers(processes, scratch)
            open_notebook(page, NOTEBOOK.name)
            try:
                run_all(page)
                wait_for_round(ROUND)
                page.locator(".jp-OutputArea-child:has(.js-plotly-plot)").last.wait_for(timeout=PATIENCE * 1000)
                # The browser may have loaded plotly's script just now.
                page.wait_for_function(
                    "() => document.querySelectorAll('.js-plotly-plot .scatterlayer .js-line').length >= 9",
                    timeout=PATIENCE * 1000,
                )
                wait_for_round(ROUND + 6)  # those were the first points only
                page.add_style_tag(content="#jp-bottom-panel { display: none }")  # it would lie over the picture
                panel = page.locator(".jp-OutputArea:has(.nbc-panel)").first
                panel.scroll_into_view_if_needed()
                panel.screenshot(path=PICTURE)
            finally:
                stop_clusters()


if __name__ == "__main__":
    main()
