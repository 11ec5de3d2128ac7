"""Serves a hybrid language model: prompts arrive and leave, all that are there share every step (continuous batching).

    python examples/serve.py                                                   # a small model, on a CPU or a GPU
    python examples/serve.py --dim 4096 --heads 32 --layers 8 --rows 64 --requests 256 --new 256 --prompt 1024

Keys and values lie in pages, states in slots. On a GPU a step is one CUDA graph, captured once and replayed while
sequences come and go. If the pages run out, the youngest sequence gives its own back and waits for another turn. The
last line says how long a step takes, and how long reading its weights and caches would.
"""

from __future__ import annotations

import random
import time
from collections import deque

import click
import torch
from hybrid_lm import Config, HybridLM
from rich.live import Live
from torch import Tensor

from fulmen.layers import PoolFull, Sequence, Sequences


class Request:
    def __init__(self, prompt: list[int], new: int) -> None:
        self.prompt, self.new = prompt, new  # new: how many tokens to generate
        self.tokens: list[int] = []
        self.sequence: Sequence | None = None

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.new


class Server:
    """Rows of a batch, each empty or with a request."""

    def __init__(self, model: HybridLM, rows: int, max_length: int, pages: int, page_size: int = 64) -> None:
        self.model, self.device = model, model.embed.weight.device
        pages = max(pages, -(-max_length // page_size))  # of one request alone: else it would wait for ever
        self.served = Sequences(rows, max_length, pages=pages, page_size=page_size, slots=rows, device=self.device)
        self.pools = [block.attention.new_pool(self.served) for block in model.blocks]  # type: ignore[operator, union-attr]
        self.rows: list[Request | None] = [None] * rows
        self.ids = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.device.type == "cuda":
            self.served.step([], 1)  # of empty rows; ids are read from and written to `self.ids`
            for _ in range(3):
                self.ids.copy_(self._tokens(self.ids))
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.ids.copy_(self._tokens(self.ids))

    def _tokens(self, ids: Tensor) -> Tensor:
        """The likeliest next token of each row, (B, 1)."""
        return self.model(ids, self.pools)[:, -1:].argmax(-1)

    def admit(self, request: Request, chunk: int = 512) -> bool:
        """Reads the prompt in chunks into a free row, for its first token; False: no row, or too little memory."""
        if None not in self.rows:
            return False
        sequence, ids = self.served.new(), request.prompt + request.tokens
        try:
            for i in range(0, len(ids), chunk):
                part = torch.tensor([ids[i : i + chunk]], device=self.device)
                self.served.step([sequence], part.shape[1])
                token = self._tokens(part)
        except PoolFull:
            self.served.free(sequence)
            return False
        request.sequence, self.rows[self.rows.index(None)] = sequence, request
        self._take(request, int(token))
        return True

    def step(self) -> list[Request]:
        """One token for every row. Returns the requests that left: finished, or put off for want of pages."""
        left = []
        while True:
            try:
                self.served.step([r and r.sequence for r in self.rows], 1)
                break
            except PoolFull:
                youngest = min((r for r in self.rows if r), key=lambda r: len(r.tokens))
                left.append(self._leave(youngest))
        self.ids.copy_(torch.tensor([[r.tokens[-1] if r else 0] for r in self.rows]))
        self.graph.replay() if self.graph else self.ids.copy_(self._tokens(self.ids))
        took = [self._take(r, token) for r, (token,) in zip(self.rows, self.ids.tolist(), strict=True) if r]
        return left + [request for request in took if request.done]

    def _take(self, request: Request, token: int) -> Request:
        request.tokens.append(token)
        return self._leave(request) if request.done else request

    def _leave(self, request: Request) -> Request:
        assert request.sequence is not None
        self.served.free(request.sequence)
        self.rows[self.rows.index(request)] = request.sequence = None
        return request


def floor_seconds(server: Server) -> float:
    """How long a copy takes of what a step reads: weights, and each row's keys, values and states (written, too)."""
    busy = [r.sequence for r in server.rows if r and r.sequence]
    size = sum(p.nbytes for p in server.model.parameters()) - server.model.embed.weight.nbytes
    for pool in server.pools:
        parts = sum(len(s.pages) for s in busy) if hasattr(pool, "at") else 2 * len(busy)
        size += parts * sum(x[0].nbytes for x in pool.memory)
    return size / 4.2e12  # bytes a second that an H200 copies


@click.command(context_settings={"show_default": True})
@click.option("--pattern", default="LLLG", help="Attention of the layers in turn: L lightning, G grouped, M latent.")
@click.option("--layers", default=4)
@click.option("--dim", default=128)
@click.option("--heads", default=4)
@click.option("--rows", default=8, help="Sequences a step serves.")
@click.option("--requests", default=24)
@click.option("--prompt", default=48, help="Tokens of the longest prompt.")
@click.option("--new", default=32, help="Tokens to generate for each request.")
@torch.no_grad()
def main(pattern: str, layers: int, dim: int, heads: int, rows: int, requests: int, prompt: int, new: int) -> None:
    """Serve random prompts with a model of random weights."""
    draw, vocab = random.Random(0), 512
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = HybridLM(Config(vocab, pattern, layers, dim, heads)).to(device, dtype).eval()
    length = prompt + new
    server = Server(model, rows, length, pages=rows * -(-length // 64) * 3 // 4 + 1)
    prompts = ([draw.randrange(vocab) for _ in range(draw.randint(1, prompt))] for _ in range(requests))
    asked = [Request(ids, new) for ids in prompts]
    waiting, steps, stepping, floor, begun = deque(asked), 0, 0.0, 0.0, time.perf_counter()
    with Live(refresh_per_second=8) as live:  # tokens/s: those generated, over all the time, that of prompts included
        while waiting or any(server.rows):
            while waiting and server.admit(waiting[0]):
                waiting.popleft()
            busy, floor, start = sum(map(bool, server.rows)), floor + floor_seconds(server), time.perf_counter()
            waiting.extendleft(r for r in server.step() if not r.done)
            stepping, steps = stepping + time.perf_counter() - start, steps + 1
            done, made = sum(r.done for r in asked), sum(len(r.tokens) for r in asked)
            rate = made / (time.perf_counter() - begun)
            live.update(f"{done} of {requests} done, {busy} rows, {len(waiting)} wait; {rate:,.0f} tokens/s")
    took, least = 1e3 * stepping / steps, 1e3 * floor / steps
    print(f"\n{made} tokens in {steps} steps of {took:.2f} ms; on an H200 bytes alone take {least:.3f} ms")


if __name__ == "__main__":
    main()
