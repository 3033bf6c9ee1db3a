"""KV events for routers, in the format of vLLM (`llamahybrid.events.publisher`)."""
