//! Features and the configuration space (virtio 1.2, sections 5.2.3 and 5.2.4).

use fathom_block::{Disk, SECTOR_SIZE};
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::chain::CHAIN_LENGTH_MAX;
use super::request::SEGMENTS_MAX;

/// The length of the configuration space, in bytes: `struct virtio_blk_config` up to the zoned
/// fields of virtio 1.3.
const CONFIG_LENGTH: usize = 96;
/// The most sectors that one segment of a discard or write-zeroes request may have: 2 GiB.
const SECTORS_MAX: u32 = (2 << 30) / SECTOR_SIZE as u32;
/// The most data segments of a read or write: 1 MiB in separate pages, less two for the header and
/// the status, so that a chain has at most 256 descriptors. Drivers stay below this number, which
/// is lower than the limit that the device enforces.
const SEGMENTS_PER_REQUEST: u32 = 254;
const _: () = assert!(SEGMENTS_PER_REQUEST as usize + 2 <= CHAIN_LENGTH_MAX);

/// The bit of `VHOST_F_LOG_ALL`.
pub(super) const LOG_ALL: u64 = 1 << 26;

/// Whether `features` has the bit of this number.
pub(super) fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}

/// The features that the device offers for `disk`.
pub(super) fn features(disk: &Disk) -> u64 {
    let capabilities = disk.capabilities();
    let bits = [
        (VIRTIO_F_VERSION_1, true),
        (VIRTIO_RING_F_INDIRECT_DESC, true),
        (VIRTIO_RING_F_EVENT_IDX, true),
        (VIRTIO_BLK_F_SEG_MAX, true),
        (VIRTIO_BLK_F_BLK_SIZE, true),
        (VIRTIO_BLK_F_TOPOLOGY, true),
        (VIRTIO_BLK_F_MQ, true),
        (VIRTIO_BLK_F_FLUSH, capabilities.flush),
        (VIRTIO_BLK_F_RO, !capabilities.write),
        (VIRTIO_BLK_F_DISCARD, capabilities.write && capabilities.discard),
        (VIRTIO_BLK_F_WRITE_ZEROES, capabilities.write && capabilities.write_zeroes),
    ];
    let offered = bits.into_iter().filter(|&(_, offered)| offered);
    offered
        .fold(VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() | LOG_ALL, |features, (bit, _)| {
            features | 1 << bit
        })
}

/// The protocol features of the connection.
pub(super) fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
}

/// The configuration space of `disk` with `queues` queues.
///
/// ```text
///  0 u64 capacity, sectors      24 u8 physical block exponent   36 u32 max discard sectors
///  8 u32 size max (unused)      25 u8 alignment offset          40 u32 max discard segments
/// 12 u32 segments max           26 u16 minimum I/O, blocks      44 u32 discard alignment, sectors
/// 16 geometry (unused)          28 u32 optimal I/O, blocks      48 u32 max write-zeroes sectors
/// 20 u32 block size             32 u8 write cache, u8, u16 queues  52 u32 segments, 56 u8 may unmap
/// ```
pub(super) fn space(disk: &Disk, queues: u16) -> [u8; CONFIG_LENGTH] {
    let geometry = disk.geometry();
    let capabilities = disk.capabilities();
    let mut space = [0; CONFIG_LENGTH];
    let mut put = |offset: usize, bytes: &[u8]| {
        space[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    put(0, &(disk.capacity() / SECTOR_SIZE).to_le_bytes());
    put(12, &SEGMENTS_PER_REQUEST.to_le_bytes());
    put(20, &geometry.block_size.to_le_bytes());
    let exponent = (geometry.physical_block_size / geometry.block_size).max(1).ilog2();
    put(24, &[exponent as u8]);
    put(26, &1_u16.to_le_bytes());
    put(28, &(geometry.optimal_size / geometry.block_size).to_le_bytes());
    put(32, &[1]);
    put(34, &queues.to_le_bytes());
    let segments = SEGMENTS_MAX as u32;
    if capabilities.discard {
        let alignment = geometry.physical_block_size / SECTOR_SIZE as u32;
        put(36, &SECTORS_MAX.to_le_bytes());
        put(40, &segments.to_le_bytes());
        put(44, &alignment.max(1).to_le_bytes());
    }
    if capabilities.write_zeroes {
        put(48, &SECTORS_MAX.to_le_bytes());
        put(52, &segments.to_le_bytes());
        put(56, &[u8::from(capabilities.discard)]);
    }
    space
}
