"""The optimizer steps of an epoch, as lists."""


def steps_in(sampler) -> list[list[list[int]]]:
    """Return the micro-batches of all ranks, step by step."""
    batches, slots = [batch.tolist() for batch in sampler.micro_batches()], sampler.drawn().slots
    return [batches[at : at + slots] for at in range(0, len(batches), slots)]
