"""The Triton kernels of triton.py: one program a head relates its nodes, one a tile of a head's state passes over it.

`relate_nodes` works out what does not depend on the state, once a head: e^G, L and M ⊙ D ⊙ Q Kᵀ (torch.py has the
letters). `pass_over_state` then reads each tile of the state once; with both of its halves switched on it applies the
accepted factors of the window before, writes the tile back and verifies the next window from it.

Decays are exponentials of path sums: those j that t sees and i does not are the nodes below i, and their gates are
added up. All have one sign, so nothing cancels whatever lies above, −∞ is as good as any, and no exponential overflows,
not even where i is no ancestor of t and the sum, which means nothing, is masked. Gates are chosen, never multiplied by
a mask: −∞ · 0 is not a number. A product of tiles that is not left to tensor cores keeps its operands in registers, so
only the products that stream key channels are such; path sums and forward substitution go node by node.
"""

import triton
import triton.language as tl


@triton.jit
def relate_nodes(
    q, k, log_decay, beta, ancestors, offsets, since, lower, scores,
    HEADS: tl.constexpr, KEYS: tl.constexpr, NODES: tl.constexpr, KEY_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one row; program (head, row).

    q, k `[N, H, K]`; log_decay, beta `[N, H]`; ancestors `[N]` int64, bit i: node i is an ancestor, or the node itself;
    offsets `[B + 1]`. Leaves since `[N, H]` e^{G_t}; of node t lower `[N, H, NODES]` row t of L, and scores
    `[N, H, NODES]` column t of M ⊙ D ⊙ Q Kᵀ.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    first = tl.load(offsets + row)
    count = (tl.load(offsets + row + 1) - first).to(tl.int32)
    at = tl.arange(0, NODES)
    real = at < count
    node = (first + at) * HEADS + head

    bits = tl.load(ancestors + first + at, mask=real, other=0)
    path_sums = tl.zeros((NODES, NODES), tl.float32)
    from_state = tl.zeros((NODES,), tl.float32)
    for j in range(0, count):
        gate = tl.load(log_decay + (first + j) * HEADS + head)
        passes = ((bits >> j) & 1) != 0
        path_sums += tl.where(passes[:, None] & ~passes[None, :], gate, 0.0)
        from_state += tl.where(passes, gate, 0.0)
    tl.store(since + node, tl.exp(from_state), mask=real)
    sees = ((bits[:, None] >> at[None, :]) & 1) != 0  # [t, i]: i lies on t's path
    between = tl.where(sees, tl.exp(path_sums), 0.0)

    by_k = tl.zeros((NODES, NODES), tl.float32)
    by_q = tl.zeros((NODES, NODES), tl.float32)
    for start in range(0, KEYS, KEY_BLOCK):
        channel = start + tl.arange(0, KEY_BLOCK)
        there = real[:, None] & (channel < KEYS)[None, :]
        place = node[:, None] * KEYS + channel[None, :]
        x = tl.load(k + place, mask=there, other=0.0).to(tl.float32)
        y = tl.load(q + place, mask=there, other=0.0).to(tl.float32)
        by_k = tl.dot(x, tl.trans(x), by_k, input_precision=PRECISION)
        by_q = tl.dot(y, tl.trans(x), by_q, input_precision=PRECISION)

    rate = tl.load(beta + node, mask=real, other=0.0)
    before = sees & (at[:, None] != at[None, :])
    tl.store(
        lower + node[:, None] * NODES + at[None, :],
        tl.where(before, rate[:, None] * between * by_k, 0.0), mask=real[:, None],
    )  # fmt: skip
    tl.store(scores + node[None, :] * NODES + at[:, None], tl.where(sees, between * by_q, 0.0), mask=real[None, :])


@triton.jit
def pass_over_state(
    source, goal, path_keys, path_values, path_decay, path_nodes, path_starts,
    q, k, v, beta, since, lower, scores, offsets, outputs, written,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, NODES: tl.constexpr, PATH: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of value channels of one head of one row; program (tile, head, row).

    source, goal `[B, H, K, V]`. PATH > 0: the factors path_keys `[N′, H, K]`, path_values `[N′, H, V]` and path_decay
    `[N′, H]` of the flat nodes path_nodes[path_starts[b] … path_starts[b + 1]], root first, are applied and goal is
    written; goal may be source. NODES > 0: the window's nodes are verified, which fills outputs and written `[N, H, V]`
    (the factors u). A program reads and writes its own tile alone, each number once.
    """
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tile * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    inside = column < VALUES
    base = (row.to(tl.int64) * HEADS + head) * KEYS * VALUES

    if PATH > 0:
        begin = tl.load(path_starts + row)
        length = tl.load(path_starts + row + 1) - begin
        step = tl.arange(0, PATH)
        on_path = step < length
        factor = tl.load(path_nodes + begin + step, mask=on_path, other=0) * HEADS + head
        path_gate = tl.load(path_decay + factor, mask=on_path, other=0.0)
        after = tl.exp(tl.sum(tl.where(step[None, :] > step[:, None], path_gate[None, :], 0.0), 1))
        through = tl.exp(tl.sum(path_gate, 0))
        u_place = factor[:, None] * VALUES + column[None, :]
        u = tl.load(path_values + u_place, mask=on_path[:, None] & inside[None, :], other=0.0)
        weighted = after[:, None] * u

    if NODES > 0:
        first = tl.load(offsets + row)
        count = (tl.load(offsets + row + 1) - first).to(tl.int32)
        at = tl.arange(0, NODES)
        real = at < count
        node = (first + at) * HEADS + head
        seen_by_k = tl.zeros((NODES, VALUE_BLOCK), tl.float32)
        seen_by_q = tl.zeros((NODES, VALUE_BLOCK), tl.float32)

    for start in range(0, KEYS, KEY_BLOCK):
        channel = start + tl.arange(0, KEY_BLOCK)
        in_head = channel < KEYS
        place = base + channel[:, None] * VALUES + column[None, :]
        there = in_head[:, None] & inside[None, :]
        state = tl.load(source + place, mask=there, other=0.0)
        if PATH > 0:
            key_place = factor[:, None] * KEYS + channel[None, :]
            keys = tl.load(path_keys + key_place, mask=on_path[:, None] & in_head[None, :], other=0.0).to(tl.float32)
            advanced = tl.dot(tl.trans(keys), weighted, through * state, input_precision=PRECISION)
            # A row that accepted nothing keeps its bits, whatever they are.
            state = tl.where(length > 0, advanced, state)
            tl.store(goal + place, state, mask=there)
        if NODES > 0:
            x_place = node[:, None] * KEYS + channel[None, :]
            x_mask = real[:, None] & in_head[None, :]
            x = tl.load(k + x_place, mask=x_mask, other=0.0).to(tl.float32)
            y = tl.load(q + x_place, mask=x_mask, other=0.0).to(tl.float32)
            seen_by_k = tl.dot(x, state, seen_by_k, input_precision=PRECISION)
            seen_by_q = tl.dot(y, state, seen_by_q, input_precision=PRECISION)

    if NODES > 0:
        line = node[:, None] * VALUES + column[None, :]
        shown = real[:, None] & inside[None, :]
        rate = tl.load(beta + node, mask=real, other=0.0)[:, None]
        decay = tl.load(since + node, mask=real, other=0.0)[:, None]
        value = tl.load(v + line, mask=shown, other=0.0).to(tl.float32)
        # Rows before t hold u already, row t and those after it what is still to be corrected: forward substitution.
        u_rows = tl.where(shown, rate * (value - decay * seen_by_k), 0.0)
        out = decay * seen_by_q
        for t in range(0, count):
            of_t = ((first + t) * HEADS + head) * NODES + at
            weights = tl.where(at == t, 1.0, -tl.load(lower + of_t))
            found = tl.sum(weights[:, None] * u_rows, 0)
            u_rows = tl.where(at[:, None] == t, found[None, :], u_rows)
            out += tl.load(scores + of_t)[:, None] * found[None, :]
        tl.store(written + line, u_rows, mask=shown)
        tl.store(outputs + line, out.to(outputs.dtype.element_ty), mask=shown)
