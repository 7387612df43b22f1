//! The event: one record for each request and each response.

use crate::record::record;

/// The request must be durable at its completion.
pub const FLAG_FORCE_UNIT_ACCESS: u16 = 1;
/// The request's zeroes must stay allocated.
pub const FLAG_KEEP_ALLOCATED: u16 = 2;
/// The zeroes must be written fast, or the request must be refused.
pub const FLAG_ONLY_IF_FAST: u16 = 4;

/// The values that all events of a disk have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// `VMName`: the virtual machine.
    pub vm_name: String,
    /// `VDisk`: the disk's name in its guest or in the configuration.
    pub virtual_disk: String,
    /// `PDisk`: the image or device that stores the disk.
    pub physical_disk: String,
}

record! {
    /// One record of 112 bytes, described in `docs/events.md`. The names are those of Table 3.1 of
    /// the monitoring paper. The meaning is that of most of the request's bytes. Texts are numbers
    /// of [`Names`](crate::Names); 0 is none.
    ///
    /// `VMName`, `VDisk` and `PDisk` are the same for all events of a disk: [`Labels`] has them,
    /// and `disk` is their key. The receiver of the event adds `FtrTS`, `MtrTS` and `IP`.
    Event {
        /// `BlktapTS`: the time of the event, in nanoseconds of the stack's clock
        /// (`CLOCK_MONOTONIC`).
        blktap_ts: u64,
        /// `ReqId`: the same for a request and its response, unique within the disk.
        req_id: u64,
        /// `Sector`: the first sector of 512 bytes that the range touches.
        sector: u64,
        /// `Size`: the number of sectors that the range touches; 0 if the operation has no range.
        size: u64,
        /// The disk's number: the key of its [`Labels`].
        disk: u32,
        /// `Type`: `Q` a request, `R` its response, `E` a response after a failure, `N` the
        /// response to an unsupported operation.
        record_type: u8,
        /// `IOOp`: the operation's letter.
        io_op: u8,
        /// Flags of the request: `FLAG_…` in the low byte, and the flags of the guest's kernel
        /// ([`RequestFlags`](crate::RequestFlags)) in the high byte.
        flags: u16,
        /// For `E` and `N`: 1 + the position of the error in the list of errors; 0 otherwise.
        error: u8,
        /// `Kind`: the number of the [`Kind`](crate::Kind); 0 is unknown.
        kind: u8,
        /// `Class`: 1 + the I/O class; 0 is none.
        class: u8,
        /// `CacheHit` of a response: 0 unknown, 1 miss, 2 hit, 3 in part.
        cache_hit: u8,
        /// `Layer` of a response: 1 + the position of the layer that completed the request, counted
        /// from the front end; 0 for the back end.
        layer: u8,
        /// The source of the meaning: the number of the [`InsightSource`](crate::InsightSource).
        source: u8,
        /// The I/O priority that the guest set; 0 is none.
        io_priority: u16,
        /// `Inode`: the file's number; 0 if unknown.
        inode: u64,
        /// `FileSize`, in bytes; 0 if unknown.
        file_size: u64,
        /// `Path`: the file's path.
        path: u32,
        /// `FileSystem`: its type.
        file_system: u32,
        /// `Cgroup`: the path of the control group.
        cgroup: u32,
        /// `Process`: the command of the process.
        process: u32,
        /// The name of the file system's block device.
        device: u32,
        /// The process number; 0 if unknown.
        process_id: u32,
        /// The disk's queue that received the request.
        queue: u32,
        /// The number of parts with different meanings; 0 if there is one.
        parts: u16,
        /// The confidence in the meaning: the number of the [`Confidence`](crate::Confidence).
        confidence: u8,
        /// The lifetime that the application expects of the written data; 0 is not set.
        write_hint: u8,
        /// `HeldTime` of a response: the time for which layers have held the request back by their
        /// own rules, in microseconds, saturating.
        held_us: u32,
        /// `HeldBy` of a response: the number of the kind of the last such layer; 0 for none.
        held_by: u8,
        /// `DbSystem`: the number of the [`DatabaseSystem`](crate::DatabaseSystem); 0 is none.
        database_system: u8,
        /// `DbPart`: the number of the [`DatabasePart`](crate::DatabasePart); 0 is none.
        database_part: u8,
        /// `ProcessRole`: the number of the [`ProcessRole`](crate::ProcessRole); 0 is none.
        process_role: u8,
        /// `DbIndex`: the number of the table or index within its database; 0 if unknown.
        database_index: u32,
        /// The start of the process, in hundredths of a second since the guest's boot, modulo 2³²;
        /// 0 if unknown. `ProcessStart` has it in nanoseconds.
        process_start: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Record;

    #[test]
    fn words_keep_every_field() {
        let event = Event {
            blktap_ts: 1,
            req_id: 2,
            sector: 3,
            size: 4,
            disk: 5,
            record_type: b'E',
            io_op: b'z',
            flags: 0x0102,
            error: 6,
            kind: 7,
            class: 8,
            cache_hit: 9,
            layer: 10,
            source: 11,
            io_priority: 0x0c0d,
            inode: 14,
            file_size: 15,
            path: 16,
            file_system: 17,
            cgroup: 18,
            process: 19,
            device: 20,
            process_id: 21,
            queue: 22,
            parts: 0x1718,
            confidence: 25,
            write_hint: 26,
            held_us: 0x1b1c_1d1e,
            held_by: 31,
            database_system: 32,
            database_part: 33,
            process_role: 34,
            database_index: 0x2324_2526,
            process_start: 0x2728_292a,
        };
        assert_eq!(Event::from_words(event.to_words()), event);
    }
}
