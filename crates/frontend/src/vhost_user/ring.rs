//! The split virtqueue, device side (virtio 1.2, section 2.7).
//!
//! The guest may write the ring's memory at any time. So each field is read once, by a volatile or
//! atomic access, and checked before use; later changes by the guest have no effect. The addresses
//! of the three parts are resolved when the ring starts, and the ring holds their memory.

use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use fathom_guest_memory::{GuestAddress, GuestMemory, MemoryAccess, Purpose, absences};

use super::chain::Descriptor;
use super::memory::Memory;

/// The largest ring, in descriptors: QEMU's limit. Virtio allows 32,768 for a split ring.
pub(super) const RING_SIZE_MAX: u16 = 1024;

/// A guest's pager brings the parts of a new ring in within this time.
const ABSENT_TIME_MAX: Duration = Duration::from_secs(5);
const ABSENT_PAUSE: Duration = Duration::from_millis(1);

/// `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const NO_INTERRUPT: u16 = 1;
/// `VIRTQ_USED_F_NO_NOTIFY`.
const NO_NOTIFY: u16 = 1;

/// Why a ring cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingError {
    /// The size is not a power of two, or too large.
    Size,
    /// A part lies outside the guest's memory, or is misaligned.
    Place,
    /// The guest's index announces more available requests than the ring has descriptors.
    AvailableIndex,
    /// A request begins with a descriptor that the ring does not have.
    Head,
}

impl RingError {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Size => "a ring size that is not a power of two or is too large",
            Self::Place => "a ring outside the guest's memory",
            Self::AvailableIndex => "more requests available than the ring holds",
            Self::Head => "a head descriptor outside the ring",
        }
    }
}

/// The addresses of a ring's parts in the front end's process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RingAddresses {
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
}

/// A started ring.
pub(super) struct Ring {
    memory: GuestMemory,
    size: u16,
    descriptors: MemoryAccess<'static>,
    available: MemoryAccess<'static>,
    used: MemoryAccess<'static>,
    /// The guest-physical address of the used ring, for the dirty log.
    used_address: GuestAddress,
    event_index: bool,
    /// The count of requests taken, modulo 2¹⁶.
    next_available: u16,
    /// The count of requests given back, modulo 2¹⁶; published by [`publish`](Self::publish).
    next_used: u16,
    /// The value of `next_used` at the last decision about an interrupt.
    signalled_used: u16,
    notifications: bool,
}

impl Ring {
    /// Opens a ring, whose parts the guest's pager may have to bring in first.
    pub(super) fn open(
        memory: &Memory,
        addresses: RingAddresses,
        size: u16,
        event_index: bool,
        next_available: u16,
    ) -> Result<Self, RingError> {
        let begun = Instant::now();
        loop {
            let before = absences();
            let opened = Self::new(memory, addresses, size, event_index, next_available);
            let is_absent = opened.is_err() && absences() != before;
            if !is_absent || begun.elapsed() >= ABSENT_TIME_MAX {
                return opened;
            }
            thread::sleep(ABSENT_PAUSE);
        }
    }

    pub(super) fn new(
        memory: &Memory,
        addresses: RingAddresses,
        size: u16,
        event_index: bool,
        next_available: u16,
    ) -> Result<Self, RingError> {
        if !size.is_power_of_two() || size > RING_SIZE_MAX {
            return Err(RingError::Size);
        }
        let hold = |user_address: u64, length: u64, alignment: usize, purpose| {
            let address = memory.guest_address(user_address).ok_or(RingError::Place)?;
            let part = memory.guest().hold(address, length, purpose);
            let part = part.filter(|part| part.is_aligned(alignment)).ok_or(RingError::Place)?;
            Ok((part, address))
        };
        let count = u64::from(size);
        let (descriptors, _) = hold(addresses.descriptors, 16 * count, 16, Purpose::Read)?;
        // Flags and index precede the entries, and the event word follows them.
        let (available, _) = hold(addresses.available, 4 + 2 * count + 2, 2, Purpose::Read)?;
        let (used, used_address) = hold(addresses.used, 4 + 8 * count + 2, 4, Purpose::Write)?;
        let mut ring = Self {
            descriptors,
            available,
            used,
            used_address,
            memory: memory.guest().clone(),
            size,
            event_index,
            next_available,
            next_used: 0,
            signalled_used: 0,
            notifications: true,
        };
        ring.next_used = ring.used_index();
        ring.signalled_used = ring.next_used;
        Ok(ring)
    }

    /// The same ring with its current count, and with its parts at `addresses` in `memory`.
    pub(super) fn moved(
        &self,
        memory: &Memory,
        addresses: RingAddresses,
    ) -> Result<Self, RingError> {
        Self::new(memory, addresses, self.size, self.event_index, self.next_available)
    }

    pub(super) fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    pub(super) fn next_available(&self) -> u16 {
        self.next_available
    }

    pub(super) fn set_next_available(&mut self, next_available: u16) {
        self.next_available = next_available;
    }

    /// The count of requests given back that the guest can see.
    pub(super) fn used_index(&self) -> u16 {
        u16::from_le(self.used_word(1).load(Ordering::Relaxed))
    }

    /// The `index`th number of 16 bits of the used ring.
    fn used_word(&self, index: usize) -> &AtomicU16 {
        &self.used.u16s()[index]
    }

    /// The `index`th number of 16 bits of the ring of available requests.
    fn available_word(&self, index: usize, order: Ordering) -> u16 {
        u16::from_le(self.available.load_u16(index, order))
    }

    fn available_index(&self, order: Ordering) -> u16 {
        self.available_word(1, order)
    }

    /// Whether a request is available. The check is cheap: one load.
    pub(super) fn has_available(&self) -> bool {
        self.available_index(Ordering::Relaxed) != self.next_available
    }

    /// Takes up to `count_max` available requests off the ring in order, and appends their heads to
    /// `heads`.
    pub(super) fn take(&mut self, count_max: usize, heads: &mut Vec<u16>) -> Result<(), RingError> {
        // Acquire: the entries below the index, and their descriptors, are read after it.
        let waiting = self.available_index(Ordering::Acquire).wrapping_sub(self.next_available);
        if waiting > self.size {
            return Err(RingError::AvailableIndex);
        }
        for _ in 0..usize::from(waiting).min(count_max) {
            let slot = usize::from(self.next_available & (self.size - 1));
            let head = self.available_word(2 + slot, Ordering::Relaxed);
            if head >= self.size {
                return Err(RingError::Head);
            }
            self.next_available = self.next_available.wrapping_add(1);
            heads.push(head);
        }
        Ok(())
    }

    /// The descriptor at `index`, which must be below the size.
    pub(super) fn descriptor(&self, index: u16) -> Descriptor {
        let at = 2 * usize::from(index);
        Descriptor::of([at, at + 1].map(|at| self.descriptors.load_u64(at, Ordering::Relaxed)))
    }

    /// Gives back the request that began at `head`; `length` bytes were written to its memory.
    /// The guest sees it with the next [`publish`](Self::publish).
    pub(super) fn give_back(&mut self, head: u16, length: u32) {
        let slot = usize::from(self.next_used & (self.size - 1));
        // Flags and index come first.
        let entry = &self.used.u32s()[1 + 2 * slot..][..2];
        entry[0].store(u32::from(head).to_le(), Ordering::Relaxed);
        entry[1].store(length.to_le(), Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Publishes the requests given back, so that the guest sees them.
    pub(super) fn publish(&mut self) {
        self.used_word(1).store(self.next_used.to_le(), Ordering::Release);
    }

    /// The count of requests given back, including those not yet published.
    pub(super) fn next_used(&self) -> u16 {
        self.next_used
    }

    /// The guest-physical range, address and length in bytes, that giving back requests writes:
    /// flags, index, entries and event word of the used ring.
    pub(super) fn used_range(&self) -> (GuestAddress, u64) {
        (self.used_address, 4 + 8 * u64::from(self.size) + 2)
    }

    /// Whether the guest needs an interrupt for the requests published since the last call.
    pub(super) fn needs_interrupt(&mut self) -> bool {
        // The index must be visible before the guest's flag or event is read (virtio 1.2, 2.7.7.2).
        fence(Ordering::SeqCst);
        let (before, after) = (self.signalled_used, self.next_used);
        if before == after {
            return false;
        }
        self.signalled_used = after;
        if self.event_index {
            let event = self.available_word(2 + usize::from(self.size), Ordering::Relaxed);
            return is_crossed(event, after, before);
        }
        self.available_word(0, Ordering::Relaxed) & NO_INTERRUPT == 0
    }

    /// Asks the guest to kick for new requests. Returns whether some have arrived in the meantime,
    /// in which case the caller must not sleep.
    pub(super) fn enable_notifications(&mut self) -> bool {
        self.notifications = true;
        if self.event_index {
            let event = self.used_word(2 + 4 * usize::from(self.size));
            event.store(self.next_available.to_le(), Ordering::Relaxed);
        } else {
            self.used_word(0).store(0, Ordering::Relaxed);
        }
        // The flag or event must be visible before the index is read again.
        fence(Ordering::SeqCst);
        self.has_available()
    }

    /// Asks the guest not to kick, because the ring is polled. With the event index this writes
    /// nothing: the old event stays behind the index, and the guest does not reach it for 65,536
    /// requests.
    pub(super) fn disable_notifications(&mut self) {
        if self.notifications {
            self.notifications = false;
            if !self.event_index {
                self.used_word(0).store(NO_NOTIFY.to_le(), Ordering::Relaxed);
            }
        }
    }
}

/// Whether a count that has changed from `old` to `new` has passed `event` (virtio 1.2, 2.7.10).
fn is_crossed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::super::memory::tests::memory;
    use super::*;

    #[test]
    fn an_event_is_crossed_once_and_around_the_end() {
        assert!(is_crossed(4, 5, 4));
        assert!(!is_crossed(5, 5, 4));
        assert!(!is_crossed(3, 5, 4));
        assert!(is_crossed(u16::MAX, 0, u16::MAX));
        assert!(is_crossed(2, 10, u16::MAX));
        assert!(!is_crossed(10, 10, 0));
    }

    #[test]
    fn misplaced_rings_are_refused() {
        let memory = memory(1 << 16, 0x1000_0000);
        let good =
            RingAddresses { descriptors: 0x1000_0000, available: 0x1000_2000, used: 0x1000_3000 };
        let open = |addresses, size| Ring::new(&memory, addresses, size, true, 0);
        assert!(open(good, 128).is_ok());
        assert_eq!(open(good, 100).err(), Some(RingError::Size));
        assert_eq!(open(good, 0).err(), Some(RingError::Size));
        assert_eq!(open(good, 2048).err(), Some(RingError::Size));
        let cases = [
            RingAddresses { descriptors: 0x1000_0008, ..good },
            RingAddresses { descriptors: 0x1000_ff00, ..good },
            RingAddresses { available: 0x0fff_fffe, ..good },
            RingAddresses { used: 0x1000_3002, ..good },
            RingAddresses { used: 0x1000_fffc, ..good },
        ];
        for addresses in cases {
            assert_eq!(open(addresses, 128).err(), Some(RingError::Place), "{addresses:?}");
        }
    }

    #[test]
    fn a_ring_with_an_invalid_index_or_head_is_refused() {
        let memory = memory(1 << 16, 0);
        let addresses = RingAddresses { descriptors: 0, available: 0x2000, used: 0x3000 };
        let mut ring = Ring::new(&memory, addresses, 16, false, 0).unwrap();
        let put = |index: u64, word: u16| {
            let access = memory.guest().access(0x2000 + 2 * index, 2, Purpose::Write);
            access.unwrap().write(0, &word.to_le_bytes());
        };
        put(1, 17);
        let mut heads = Vec::new();
        assert_eq!(ring.take(64, &mut heads), Err(RingError::AvailableIndex));
        put(1, 2);
        put(2, 3);
        put(3, 16);
        assert_eq!(ring.take(64, &mut heads), Err(RingError::Head));
        assert_eq!(heads, [3]);
    }
}
