"""What a run was trained on: what a tracker shows as its configuration, beside the settings of its jobs."""

from notebook_cluster.protocol.state import ClusterView


def cluster_settings(view: ClusterView) -> dict[str, str]:
    """Of the cluster: its name, nodes and devices."""
    devices = {node.name: node.device_name or node.device or "cpu" for node in view.nodes}
    return {
        "cluster": view.name,
        "world_size": str(len(devices)),
        "nodes": ", ".join(devices),
        "devices": ", ".join(f"{name}: {device}" for name, device in devices.items()),
    }
