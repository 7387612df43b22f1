//! The Fathom daemon: configuration, wiring, control interface and metrics.
