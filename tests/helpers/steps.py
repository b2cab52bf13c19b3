"""The optimizer steps of an epoch, as lists, and the rule that all of them keep."""


def steps_in(sampler) -> list[list[list[int]]]:
    """Return the micro-batches of all ranks, step by step."""
    batches = [batch.tolist() for batch in sampler.micro_batches()]
    slots = sampler.drawn().slots
    return [batches[at : at + slots] for at in range(0, len(batches), slots)]


def assert_exactly_once(ranks, num_documents: int, accumulation: int = 1) -> None:
    """Every document is in exactly one micro-batch; all ranks have equally many, in whole steps."""
    assert sorted(d for batches in ranks for b in batches for d in b) == list(range(num_documents))
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) % accumulation == 0
