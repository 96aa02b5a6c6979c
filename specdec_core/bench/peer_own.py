"""Our own decoder under the stopwatch of its peers, so that ratios to them pair within one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specdec_core.bench.peer_decoders import AR, PLAIN, Decoder, Peer, PeerRun, Setting, Stopwatch, grid
from specdec_core.bench.serial_backends import BackendFactory
from specdec_core.decode import decode
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.protocol import Drafter, Target
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

FLOAT32, INT8 = "numba float32", "numba int8"

DrafterOf = Callable[[Transformer], Drafter]
DRAFTERS: Mapping[str, DrafterOf] = {
    "n-gram": lambda target: NGramDrafter(),
    "its first layers": lambda target: LayerSkipDrafter(target, max(1, target.config.layers // 3)),
}
"""Method → drafter: what the peers have too."""


def own_peers(
    factory: BackendFactory, backend: str, drafts: Sequence[int], drafters: Mapping[str, DrafterOf] = DRAFTERS
) -> list[Peer]:
    """Our engine in float32 or int8 (`backend`), autoregressive and with each of these drafters (method → drafter)."""
    if backend not in (FLOAT32, INT8):
        raise ValueError(f"backend {backend!r}: expected {FLOAT32!r} or {INT8!r}")
    target = factory.open(backend)
    assert isinstance(target, Transformer)
    engine, format = backend.split()

    def peer(method: str, settings: Sequence[Setting], drafter: Drafter | None) -> Peer:
        decoder = own_decoder(target, drafter)
        return Peer(backend, engine, format, method, tuple(settings), decoder, threads=factory.threads, exact=True)

    speculating = [peer(method, grid(drafts), make(target)) for method, make in drafters.items()]
    return [peer(AR, [PLAIN], None), *speculating]


def own_decoder(target: Target, drafter: Drafter | None) -> Decoder:
    def decoder(prompt: tuple[int, ...], options: Options, setting: Setting) -> PeerRun:
        policy = FixedLength(setting.draft) if setting.draft else None
        watch = Stopwatch()
        for each in decode(target, [Request(prompt, options, policy)], drafter):
            watch.emit(each.rows[0].emitted)
        return watch.run(watch.emissions - 1)

    return decoder
