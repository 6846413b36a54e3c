"""What ``jupyter_server_config.py`` may set."""

from traitlets import Float, validate
from traitlets.config import Configurable


class NotebookCluster(Configurable):  # type: ignore[misc]
    """Settings of the extension: ``c.NotebookCluster.unreachable_after = 30.0``."""

    unreachable_after = Float(
        15.0, help="Seconds of silence after which a cluster is shown as unreachable; asked after a third of them."
    ).tag(config=True)

    @validate("unreachable_after")  # type: ignore[untyped-decorator]
    def _in_range(self, proposal: dict[str, float]) -> float:
        value = proposal["value"]
        if not 0.1 <= value <= 3600.0:
            raise ValueError(f"NotebookCluster.unreachable_after = {value:g}: use 0.1 to 3600 seconds")
        return value
