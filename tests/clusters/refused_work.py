"""A cluster from start to stop, in an environment that a test has chosen.

Prints what each step gave, as JSON.
"""

from __future__ import annotations

import json
import os
import signal

from nbdist import Cluster
from nbdist.errors import CellError, StartError


def main() -> None:
    cluster = Cluster(2, device="cpu", threads=1)
    try:
        cluster.start()
    except StartError as error:
        print(json.dumps({"refused": str(error)}))
        return
    with cluster:
        found = {"started": cluster.infos[0].started, "first": cluster["rank"]}
        cluster.execute("kept = 5")
        try:
            cluster.execute(
                f"import os\nif rank: os.kill(os.getpid(), {signal.SIGKILL})\n"
                "nbdist.barrier()"
            )
        except CellError as error:
            found["death"] = str(error)
        os.kill(cluster.infos[0].pid, signal.SIGKILL)
        assert cluster._live().await_deaths(lambda died: 0 in died, 60)
        cluster.repair()
        cluster.replace([1])
        found |= {"kept": cluster["kept"], "size": cluster.size}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
