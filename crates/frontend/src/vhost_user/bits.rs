//! The names of the bits that a VMM and the front end agree on.

/// The names of the virtio features in `bits`.
pub fn virtio_features(bits: u64) -> Vec<String> {
    const NAMES: [(u32, &str); 17] = [
        (1, "size-max"),
        (2, "seg-max"),
        (4, "geometry"),
        (5, "read-only"),
        (6, "block-size"),
        (9, "flush"),
        (10, "topology"),
        (11, "write-cache"),
        (12, "multi-queue"),
        (13, "discard"),
        (14, "write-zeroes"),
        (26, "log-all"),
        (28, "indirect"),
        (29, "event-index"),
        (30, "protocol-features"),
        (32, "version-1"),
        (34, "packed"),
    ];
    named(bits, &NAMES)
}

/// The names of the vhost-user protocol features in `bits`.
pub fn protocol_features(bits: u64) -> Vec<String> {
    const NAMES: [(u32, &str); 12] = [
        (0, "multi-queue"),
        (1, "log-shared-memory"),
        (3, "reply-ack"),
        (5, "backend-request"),
        (9, "config"),
        (10, "backend-send-fd"),
        (12, "inflight-shared-memory"),
        (13, "reset-device"),
        (15, "configure-memory-slots"),
        (16, "status"),
        (18, "shared-object"),
        (19, "device-state"),
    ];
    named(bits, &NAMES)
}

fn named(bits: u64, names: &[(u32, &str)]) -> Vec<String> {
    let name = |bit: u32| match names.iter().find(|(known, _)| *known == bit) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("bit-{bit}"),
    };
    (0..u64::BITS).filter(|bit| bits >> bit & 1 == 1).map(name).collect()
}
