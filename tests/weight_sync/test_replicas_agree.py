"""What several training ranks hold must be equal on all of them: engines that receive from different ranks would serve
different policies otherwise, each equal to its own source."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.weight_sync.protocol import EngineState, SyncError
from tests.tiny_models import make_tiny
from tests.weight_sync.routed import World, world


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("replicas")
    return {tied: [make_tiny(base / f"{tied}-{seed}", "llama", seed, vocab_size=64, num_hidden_layers=2, hidden_size=32,
                             intermediate_size=64, tie_word_embeddings=tied) for seed in (0, 1)]
            for tied in (False, True)}


@pytest.mark.parametrize("trainer, tied, names", [
    ({"dp": 2}, False, ("word_embeddings", "linear_qkv", "linear_fc1")),
    ({"tp": 2}, False, ("input_layernorm", "final_layernorm")),
    ({"pp": 2}, True, ("word_embeddings",)),
], ids=["DP", "norms under TP", "tied embeddings"])
def test_ranks_that_hold_different_weights_are_named_and_nothing_is_committed(folders, trainer, tied, names):
    async def run(one: World) -> None:
        await one.coordinator.setup()
        await one.coordinator.sync(0)
        await one.sources[1].call("load", str(folders[tied][1]))
        with pytest.raises(SyncError, match="differ between training ranks that must hold the same") as error:
            await one.coordinator.sync(1)
        for line in str(error.value).splitlines()[1:-1]:
            assert " on trainer rank 0; " in line and line.endswith(" on trainer rank 1")
        for name in names:
            assert name in str(error.value)
        assert ("linear_fc1" in str(error.value)) == ("linear_fc1" in names), "matrices are cut over TP"
        assert one.coordinator.version == 0
        assert {engine.state for engine in one.engines} == {EngineState.DISCARDED}

    with world(folders[tied], "direct", 2, trainer=trainer) as one:
        asyncio.run(run(one))
