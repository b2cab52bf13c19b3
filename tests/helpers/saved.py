"""What autograd keeps of a forward."""

from torch.autograd.graph import saved_tensors_hooks


def kept_by_autograd(model):
    """Return hooks for a block, and a function that returns the bytes kept since its last call."""
    found = []
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor):
        found.append(tensor.untyped_storage())
        return tensor

    def taken():
        sizes = {storage.data_ptr(): storage.nbytes() for storage in found}
        found.clear()
        return sum(size for at, size in sizes.items() if at not in weights)

    return saved_tensors_hooks(keep, lambda tensor: tensor), taken
