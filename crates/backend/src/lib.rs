//! Back ends: where a disk's bytes are kept.
