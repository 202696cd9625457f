"""What each verb's help shows as an example. tests/integration/test_cli.py holds that every verb has one that its parser takes."""

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "demo": ("kvemb demo --store redis --nodes 3 --shards 2 --trainers 2", "kvemb demo --config kvemb.yaml"),
    "shard": ("kvemb shard --config kvemb.yaml --shard 0",),
    "status": ("kvemb status", "kvemb status --watch 10", "kvemb status --json kvemb.yaml"),
    "tables": ("kvemb tables", "kvemb tables --json --config kvemb.yaml"),
    "show": ("kvemb show user 42", "kvemb show user -5 --json"),
    "init": ("kvemb init --store redis --nodes 10.0.0.1:6379 10.0.0.2:6379 --shards 10.0.1.1:7070",),
    "doctor": ("kvemb doctor", "kvemb doctor --json kvemb.yaml"),
    "certificates": ("kvemb certificates kvemb.yaml", "kvemb certificates --days 7 --out trial"),
    "acl": ("kvemb acl > users.acl", "kvemb acl --check trainer"),
    "repair": ("kvemb repair --node 10.0.0.1:6379", "kvemb repair --all --timeout 7200"),
    "nodes": (
        "kvemb nodes kvemb.yaml",
        "kvemb nodes add kvemb.yaml 10.0.0.3:6379 --max-mb-per-s 50",
        "kvemb nodes remove kvemb.yaml 10.0.0.1:6379 --dry-run",
        "kvemb nodes replace kvemb.yaml 10.0.0.1:6379 10.0.0.4:6379 --yes",
        "kvemb nodes rebalance kvemb.yaml --weights 10.0.0.3:6379=2",
    ),
    "shards": (
        "kvemb shards kvemb.yaml",
        "kvemb shards add kvemb.yaml 10.0.1.3:7070",
        "kvemb shards remove kvemb.yaml 10.0.1.2:7070 --dry-run",
        "kvemb shards rebalance kvemb.yaml --weights 10.0.1.1:7070=2",
    ),
    "moves": ("kvemb moves kvemb.yaml", "kvemb moves abort kvemb.yaml"),
    "config": ("kvemb config show kvemb.yaml",),
    "drop": ("kvemb drop user", "kvemb drop user --yes"),
    "save": ("kvemb save s3://bucket/run/step-1000", "kvemb save s3://bucket/run/step-2000 --base s3://bucket/run/step-1000 --keep 5"),
    "load": ("kvemb load s3://bucket/run/step-1000",),
    "verify": ("kvemb verify s3://bucket/run/step-1000", "kvemb verify /backups/monday --against-storage"),
    "ls": ("kvemb ls s3://bucket/run",),
    "prune": ("kvemb prune s3://bucket/run --keep 5 --dry-run", "kvemb prune s3://bucket/run --keep 5"),
    "bench": ("kvemb bench", "kvemb bench kvemb.yaml --seconds 10 --table user --batch 100000"),
    "completion": ("kvemb completion bash > ~/.local/share/bash-completion/completions/kvemb", "kvemb completion zsh > ~/.zfunc/_kvemb"),
    "plan": ("kvemb plan --ids 1e11 --dim 10 --optimizer adam --step-ids 1e6", "kvemb plan --ids 5e8 --dim 64 --optimizer sgd --json"),
}


def example_text(verb: str) -> str:
    """Return what stands below a verb's options; "" for a verb without an example."""
    lines = EXAMPLES.get(verb, ())
    return "\n".join([f"example{'s' if len(lines) > 1 else ''}:", *(f"  {line}" for line in lines)]) if lines else ""
