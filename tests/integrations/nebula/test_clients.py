"""Scripts in the manner of Nebula's known clients (NEBULA_API.md sections 2, 8 and 10.1), run unchanged in processes.

Guards: each part of the API worked, and a client that strings them together did not.
"""

from pathlib import Path

import torch


def test_the_documented_sample_with_its_stray_comma_that_never_flushes(start, root: Path) -> None:
    """Bare `Checkpoint()`, a whole module, the latest right after, no flush: a clean exit must keep the last one."""
    client = start(
        """
        import sys, warnings
        import torch
        import nebulaml as nm

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = torch.nn.Linear(4, 2)
            def forward(self, x):
                return self.fc(x)

        warnings.simplefilter("ignore", UserWarning)
        persistent_storage_path = sys.argv[1],
        nm.init(persistent_storage_path, persistent_time_interval=2)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            checkpoint = nm.Checkpoint()
            checkpoint.save("mnist", model)
            latest = nm.get_latest_checkpoint()
            assert latest.tag == checkpoint.tag == f"global_step{epoch + 1}", latest
            assert torch.equal(latest.load("mnist").fc.weight, model.fc.weight)
        torch.save(model.fc.weight.detach(), sys.argv[1] + "/expected.pt")
        """,
        root,
    )
    client.end()
    assert (root / "global_step3" / "complete.txt").read_bytes() == b"OK"
    start.run(
        """
        import sys, torch
        import torch_nebula
        class Net(torch.nn.Module):
            pass
        torch_nebula.init(sys.argv[1])
        model = torch_nebula.get_latest_checkpoint().load("mnist", map_location="cpu")
        assert torch.equal(model.fc.weight, torch.load(sys.argv[1] + "/expected.pt", weights_only=True))
        """,
        root,
    )


def test_a_transformers_callback_that_flushes_at_the_end_and_reloads_the_best_from_disk(start, root: Path) -> None:
    """As azureml-acft-accelerator's: it imports the other name, and then reads the files without the API."""
    start.run(
        """
        import json, sys
        import torch
        import nebulaml as nm

        class NebulaCallback:
            def on_epoch_end(self, should_training_stop):
                if should_training_stop:
                    import torch_nebula
                    torch_nebula.flush_persistence()

        root = sys.argv[1]
        nm.init(persistent_storage_path=root)
        callback = NebulaCallback()
        for epoch in range(1, 4):
            checkpoint = nm.Checkpoint(f"checkpoint-{epoch * 10}", 2)
            checkpoint.save("pytorch_model.bin", {"w": torch.full((100,), epoch)})
            checkpoint.save("trainer_state", json.dumps({"epoch": epoch}))
            callback.on_epoch_end(epoch == 3)
        assert torch.load(root + "/checkpoint-20/pytorch_model.bin", weights_only=True)["w"].eq(2).all()
        """,
        root,
    )


def test_a_client_that_sets_the_variables_just_before_init(start, root: Path) -> None:
    start.run(
        """
        import os, sys
        import torch_nebula
        os.environ["NEBULA_PERSISTENT_STORAGE_PATH"] = sys.argv[1]
        os.environ["NEBULA_PERSISTENT_TIME_INTERVAL"] = "600"
        os.environ["NEBULA_MEMORY_BUFFER_SIZE"] = str(64 << 20)
        torch_nebula.init()
        torch_nebula.Checkpoint("global_step5", 1).save("states.pt", {"a": 1})
        """,
        root,
    )
    assert torch.load(root / "global_step5" / "states.pt", weights_only=True) == {"a": 1}


def test_an_engine_in_the_manner_of_deepspeeds_saves_and_loads(start, root: Path, tmp_path: Path) -> None:
    """Placeholders, a `Checkpoint` a file, `commit`, then a load file by file through the placeholder's name."""
    save_dir = tmp_path / "save_dir"
    script = """
        import os, sys
        import torch
        import torch_nebula

        root, save_dir, what = sys.argv[1:]
        settings = {"persistent_time_interval": 100, "num_of_version_in_retention": 2}
        torch_nebula.init(persistent_storage_path=root, **settings)

        def save(tag, step):
            os.makedirs(os.path.join(save_dir, tag), exist_ok=True)
            for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
                path = os.path.join(save_dir, tag, name)
                torch.save("", path)
                state = {"name": name, "w": torch.full((50,), step)}
                torch_nebula.Checkpoint(tag, -2).save(os.path.basename(path), state)
            assert torch_nebula.Checkpoint(tag, -2).commit()
            with open(os.path.join(save_dir, "latest"), "w") as file:
                file.write(tag)

        def load():
            with open(os.path.join(save_dir, "latest")) as file:
                tag = file.read().strip()
            for name in sorted(os.listdir(os.path.join(save_dir, tag))):
                checkpoint = torch_nebula.get_checkpoint(tag=tag, persist_path=root)
                if checkpoint is None or checkpoint.tag is None:
                    checkpoint = torch_nebula.get_latest_checkpoint(persist_path=root)
                state = checkpoint.load(name, map_location=lambda storage, location: storage)
                assert state["name"] == name
            return int(state["w"][0])

        if what == "save":
            for step in (10, 20):
                save(f"global_step{step}", step)
                assert load() == step
        else:
            assert load() == 20
        """
    start.run(script, root, save_dir, "save")
    start.run(script, root, save_dir, "load")
    state = torch.load(root / "global_step20" / "mp_rank_00_model_states.pt", weights_only=True)
    assert state["w"].eq(20).all()
