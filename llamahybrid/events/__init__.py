"""What can be resumed here, told to routers: KV events in vLLM's form (`llamahybrid.events.publisher`)."""
