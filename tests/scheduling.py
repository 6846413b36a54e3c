"""How tests are shared out among the workers of xdist: by file, those that take longest first.

``tests/seconds.json`` says how long files take (from 5 s on). ``python -m tests.scheduling LOG`` writes it anew from
what ``pytest -n 4 --dist loadscope --durations=0`` printed. It decides the order, and what ``make test-quick`` leaves
out: ``python -m tests.scheduling --quick`` prints the files that are not in it, and :data:`EXAMPLES` of the others.
"""

import json
import re
import sys
from collections import Counter, OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

SECONDS = Path(__file__).with_name("seconds.json")
LEAST_SECONDS = 5
EXAMPLES = ("test_cluster_cells", "test_browser_cells")
"""One file with a cluster, and one with a page in a browser, for who wants an answer in two minutes."""
_LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown) +tests/(?:\w+/)*(\w+)\.py::")


class LongestFirst(OrderedDict[str, dict[str, bool]]):
    """Scopes that wait: the one that takes longest is taken first, so that no worker ends long after the others."""

    def __init__(self, seconds: dict[str, int]) -> None:
        super().__init__()
        self._seconds = seconds

    def popitem(self, last: bool = True) -> tuple[str, dict[str, bool]]:
        scope = max(self, key=lambda name: (self._seconds.get(name, 0), len(self[name])))
        return scope, self.pop(scope)


class ByFile(LoadScopeScheduling):
    """A file stays on one worker. When a worker ends, the rest of its file goes to another one."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self.workqueue = LongestFirst(json.loads(SECONDS.read_text()))

    def _split_scope(self, nodeid: str) -> str:
        return PurePosixPath(nodeid.partition("::")[0]).stem

    def remove_node(self, node: Any) -> str | None:
        # The test with which a worker ended (a timeout does that) is not tried in the next one, nor the one after.
        units = self.assigned_work[node].values()
        pending = [(unit, test) for unit in units for test, is_done in unit.items() if not is_done]
        for unit, test in pending[:1]:
            unit[test] = True
        # What it had done is done: xdist would hand these files out once more, to workers that then wait for a test.
        own = self.assigned_work[node]
        for scope in [scope for scope, unit in own.items() if all(unit.values())]:
            del own[scope]
        super().remove_node(node)
        return pending[0][1] if pending else None


def seconds_of(log: str) -> dict[str, int]:
    """File -> seconds, longest first, from the durations that pytest printed."""
    found: Counter[str] = Counter()
    for line in log.splitlines():
        if match := _LINE.match(line):
            found[match[2]] += float(match[1])  # type: ignore[assignment]
    return {name: round(seconds) for name, seconds in found.most_common() if seconds >= LEAST_SECONDS}


def quick() -> list[str]:
    """Paths of the test files that take no time to speak of, and of :data:`EXAMPLES`."""
    long = set(json.loads(SECONDS.read_text())) - set(EXAMPLES)
    return [str(file) for file in sorted(SECONDS.parent.glob("test_*.py")) if file.stem not in long]


if __name__ == "__main__" and sys.argv[1:] == ["--quick"]:
    print("\n".join(quick()))
elif __name__ == "__main__":
    SECONDS.write_text(json.dumps(seconds_of(Path(sys.argv[1]).read_text()), indent=1) + "\n")
