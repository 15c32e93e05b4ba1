"""The emulated ConnectX NIC."""
