//! The split virtqueue, device side (virtio 1.2, section 2.7).
//!
//! The guest may write the ring's memory at any time. So each field is read once, by a volatile or
//! atomic access, and checked before use; later changes by the guest have no effect. The addresses
//! of the three parts are resolved when the ring starts. They stay mapped as long as the [`Memory`]
//! that the ring holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use fathom_block::GuestAddress;

use super::chain::RawDescriptor;
use super::memory::Memory;

/// The largest ring, in descriptors: QEMU's limit. Virtio allows 32,768 for a split ring.
pub(super) const RING_SIZE_MAX: u16 = 1024;

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

/// `struct virtq_used_elem`, little-endian, as aligned as the words of its ring.
#[repr(C, packed(2))]
#[derive(Clone, Copy)]
struct UsedElement {
    id: u32,
    length: u32,
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
    memory: Arc<Memory>,
    size: u16,
    descriptors: *const RawDescriptor,
    available: *mut u16,
    used: *mut u16,
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

// SAFETY: the pointers belong to the memory that the ring holds, which is shared between threads.
unsafe impl Send for Ring {}

impl Ring {
    pub(super) fn new(
        memory: Arc<Memory>,
        addresses: RingAddresses,
        size: u16,
        event_index: bool,
        next_available: u16,
    ) -> Result<Self, RingError> {
        if !size.is_power_of_two() || size > RING_SIZE_MAX {
            return Err(RingError::Size);
        }
        let place = |user_address: u64, length: u64, alignment: usize| {
            let address = memory.guest_address(user_address).ok_or(RingError::Place)?;
            let host = memory.translate(address, length).ok_or(RingError::Place)?;
            if host as usize % alignment != 0 {
                return Err(RingError::Place);
            }
            Ok((host, address))
        };
        let count = u64::from(size);
        let descriptors = place(addresses.descriptors, 16 * count, 16)?.0;
        // Flags and index precede the entries, and the event word follows them.
        let available = place(addresses.available, 4 + 2 * count + 2, 2)?.0;
        let (used, used_address) = place(addresses.used, 4 + 8 * count + 2, 4)?;
        let mut ring = Self {
            descriptors: descriptors.cast(),
            available: available.cast(),
            used: used.cast(),
            used_address,
            memory,
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
        memory: Arc<Memory>,
        addresses: RingAddresses,
    ) -> Result<Self, RingError> {
        Self::new(memory, addresses, self.size, self.event_index, self.next_available)
    }

    pub(super) fn memory(&self) -> &Arc<Memory> {
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
        u16::from_le(self.word(self.used, 1).load(Ordering::Relaxed))
    }

    /// The `index`th u16 of a part, as an atomic.
    #[expect(
        clippy::unused_self,
        reason = "the atomic lives no longer than the mapping that self holds"
    )]
    fn word(&self, part: *mut u16, index: usize) -> &AtomicU16 {
        // SAFETY: `new` checked that both parts are mapped in full and aligned; callers stay
        // within them; the mapping lives as long as `self.memory`; the guest's accesses are
        // those of other CPUs.
        unsafe { AtomicU16::from_ptr(part.wrapping_add(index)) }
    }

    fn available_index(&self, order: Ordering) -> u16 {
        u16::from_le(self.word(self.available, 1).load(order))
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
            let head = u16::from_le(self.word(self.available, 2 + slot).load(Ordering::Relaxed));
            if head >= self.size {
                return Err(RingError::Head);
            }
            self.next_available = self.next_available.wrapping_add(1);
            heads.push(head);
        }
        Ok(())
    }

    /// The descriptor at `index`, which must be below the size.
    pub(super) fn descriptor(&self, index: u16) -> RawDescriptor {
        assert!(index < self.size, "a descriptor of the ring");
        // SAFETY: `new` checked that the table is mapped in full and aligned; a volatile read
        // copies the guest's current bytes once.
        unsafe { self.descriptors.wrapping_add(usize::from(index)).read_volatile() }
    }

    /// Gives back the request that began at `head`; `length` bytes were written to its memory.
    /// The guest sees it with the next [`publish`](Self::publish).
    pub(super) fn give_back(&mut self, head: u16, length: u32) {
        let slot = usize::from(self.next_used & (self.size - 1));
        let entry = self.used.wrapping_add(2 + 4 * slot).cast::<UsedElement>();
        let value = UsedElement { id: u32::from(head).to_le(), length: length.to_le() };
        // SAFETY: `new` checked that the part is mapped in full; `slot` is below the size.
        unsafe { entry.write_volatile(value) };
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Publishes the requests given back, so that the guest sees them.
    pub(super) fn publish(&mut self) {
        self.word(self.used, 1).store(self.next_used.to_le(), Ordering::Release);
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
            let event = self.word(self.available, 2 + usize::from(self.size));
            let event = u16::from_le(event.load(Ordering::Relaxed));
            return is_crossed(event, after, before);
        }
        u16::from_le(self.word(self.available, 0).load(Ordering::Relaxed)) & NO_INTERRUPT == 0
    }

    /// Asks the guest to kick for new requests. Returns whether some have arrived in the meantime,
    /// in which case the caller must not sleep.
    pub(super) fn enable_notifications(&mut self) -> bool {
        self.notifications = true;
        if self.event_index {
            let event = self.word(self.used, 2 + 4 * usize::from(self.size));
            event.store(self.next_available.to_le(), Ordering::Relaxed);
        } else {
            self.word(self.used, 0).store(0, Ordering::Relaxed);
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
                self.word(self.used, 0).store(NO_NOTIFY.to_le(), Ordering::Relaxed);
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
        let memory = Arc::new(memory(1 << 16, 0x1000_0000));
        let good =
            RingAddresses { descriptors: 0x1000_0000, available: 0x1000_2000, used: 0x1000_3000 };
        let open = |addresses, size| Ring::new(Arc::clone(&memory), addresses, size, true, 0);
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
        let memory = Arc::new(memory(1 << 16, 0));
        let addresses = RingAddresses { descriptors: 0, available: 0x2000, used: 0x3000 };
        let mut ring = Ring::new(Arc::clone(&memory), addresses, 16, false, 0).unwrap();
        let index = ring.word(ring.available, 1);
        index.store(17, Ordering::Relaxed);
        let mut heads = Vec::new();
        assert_eq!(ring.take(64, &mut heads), Err(RingError::AvailableIndex));
        ring.word(ring.available, 1).store(2, Ordering::Relaxed);
        ring.word(ring.available, 2).store(3, Ordering::Relaxed);
        ring.word(ring.available, 3).store(16, Ordering::Relaxed);
        assert_eq!(ring.take(64, &mut heads), Err(RingError::Head));
        assert_eq!(heads, [3]);
    }
}
