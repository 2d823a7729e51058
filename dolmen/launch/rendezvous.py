"""Meeting again in a store that remembers. torchrun keeps one store for all restarts of a job
(torch 2.13: "we create a new TCPStore for every retry", which its agent does not), and the ranks of
a restart may read addresses that the dead have left: gloo then connects to nobody and the restart
fails. So the ranks of each start first agree on a name of their own.

    rank r    writes here/r = a name of this process alone, waits for go/<that name> = the round,
              writes went/<round>/r
    rank 0    answers every name it finds under here/r, also those of the dead, with go/<name> =
              round, until all went

torch lets one name a way to meet: `init_process_group("dolmen://")` is "env://" and then this.

As a program it is the store of torchrun's agents, in a process of its own: an agent that hosts it
cannot be lost (docs/how-to/elastic.md).
"""

import argparse
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

URL = "dolmen://"


def meet(store: Store, rank: int, size: int, seconds: float = 600) -> Store:
    """Return `store` under a key prefix that all `size` ranks of this start agree on here, so that
    they do not read keys that an earlier start left in it. Called by every rank: rank 0 waits for
    all others, each other rank for rank 0. Raises TimeoutError on rank 0 if ranks are missing after
    `seconds`, naming some.
    """
    me = uuid.uuid4().hex
    if rank:
        store.set(f"here/{rank}", me)
        name = store.get(f"go/{me}").decode()  # waits, as long as the store does
        store.set(f"went/{name}/{rank}", "")
        return PrefixStore(name, store)
    missing, answered, end = set(range(1, size)), {}, time.monotonic() + seconds
    while missing:
        for other in sorted(missing):
            if store.check([f"went/{me}/{other}"]):
                missing.discard(other)
            elif store.check([f"here/{other}"]) and (
                name := store.get(f"here/{other}").decode()
            ) != answered.get(other):
                # a name may be that of a dead process: the living rank overwrites it later
                answered[other] = name
                store.set(f"go/{name}", me)
        if missing and time.monotonic() > end:
            raise TimeoutError(
                f"{len(missing)} of {size} ranks have not joined, e.g. {sorted(missing)[:4]}"
            )
        if missing:
            time.sleep(0.02)
    return PrefixStore(me, store)


def _handler(
    url: str, timeout: timedelta = timedelta(minutes=30), **more: object
) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size) once, as torch's handler of `dolmen://` URLs in
    `init_process_group`: those of env://, with the store under the key prefix that all ranks agree
    on (`meet`).
    """
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    yield meet(store, rank, size), rank, size


def register() -> str:
    """Register with torch.distributed the rendezvous in which the ranks of each start agree on a
    prefix of the store's keys (`meet`), and return its URL for `init_process_group`, `dolmen://`.
    Calling it again is harmless.
    """
    try:
        register_rendezvous_handler("dolmen", _handler)
    except RuntimeError:
        pass  # it has been registered before
    return URL


def serve(port: int) -> None:
    """Print the port and serve a rendezvous store (torch's TCPStore) on `port` (0: any free one)
    until this process is killed. Started as `python -m dolmen.launch.rendezvous PORT`. Exits with a
    message where the port is in use.
    """
    # documented as torch.distributed's, where it is imported without being listed
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        sys.exit(f"no rendezvous store on port {port}: {str(error).splitlines()[0]}")
    print(f"rendezvous store on port {store.port}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve the rendezvous store of torchrun.")
    parser.add_argument("port", type=int, help="TCP port; 0: any free one, which is printed")
    serve(parser.parse_args().port)
