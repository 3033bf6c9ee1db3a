"""The chat API of upstream's example server, over our slots: its types, templates, parsers and events.

Experimental, for the one release whose source is pinned. Its scheduler is left out: it knows one lock, fails
all requests for an error of one, and promises more context than there is. Requests are those of `Service`.
"""
