//! The control interface's vocabulary: the JSON that the daemon and its faces exchange.
