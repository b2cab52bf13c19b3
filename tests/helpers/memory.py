"""Memory that a function allocates."""

import torch


def largest_allocation(function):
    """Return the bytes of the largest single allocation, including those inside kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")
