"""The kinds of storage, behind one port (`kvemb.stores.store.Store`)."""
