//! The rules by which nothing is lost, each of which a test can take away to see what it is for.

/// See the module. All apply, but in tests.
#[doc(hidden)]
#[expect(clippy::struct_excessive_bools, reason = "each is one rule")]
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Recovery compares the content of each block with its checksum.
    pub compares_contents: bool,
    /// The search of a segment goes on behind a missing header.
    pub goes_on_behind_gaps: bool,
    /// Overlapping changes are carried out one after the other.
    pub is_serial: bool,
    /// Freed places are not used before the checkpoint is durable.
    pub waits_for_checkpoint: bool,
    /// Nor before the reads have ended that began before it.
    pub waits_for_reads: bool,
    /// A snapshot's change names the batches in flight that it does not have.
    pub snapshot_names_batches: bool,
    /// It names the batches, too, that have failed since the last checkpoint.
    pub names_failed: bool,
    /// A batch is brought into the maps as a whole.
    pub applies_at_once: bool,
    /// A checkpoint's record names the batches in flight that it does not have.
    pub record_names_batches: bool,
    /// Headers of earlier openings do not count.
    pub compares_generations: bool,
    /// A page that an interrupted, later checkpoint has written is overwritten.
    pub overwrites_later: bool,
    /// What is written during a walk is marked.
    pub marks_new: bool,
    /// What a page refers to that is copied during a walk is walked.
    pub walks_copied: bool,
    /// A walk does not begin while a checkpoint is written.
    pub walks_between_checkpoints: bool,
    /// A snapshot, and a clone, raises the floor of its branch.
    pub raises_floor: bool,
    /// Nothing is fresh in a copied leaf.
    pub copies_stale: bool,
    /// A removed page keeps its entry of the page table until the next checkpoint's instant.
    pub keeps_removed: bool,
    /// A shared place is freed by walks alone.
    pub keeps_shared: bool,
    /// A walk does not free places to which references are being made.
    pub pins_references: bool,
    /// Blocks with equal fingerprints are compared.
    pub compares_equals: bool,
    /// The kept content of a place is dropped when the place gets another one.
    pub drops_contents: bool,
    /// A recovery drops references to blocks that are not there.
    pub drops_references: bool,
    /// A recovery takes the place of a reference again that an earlier batch has freed.
    pub takes_again: bool,
    /// Copies of leaves that are made during a walk are visited.
    pub visits_copies: bool,
    /// What changes comes into the change set of its volume.
    pub notes_changes: bool,
    /// Places are held while a block is copied from one to the other.
    pub holds_relocated: bool,
    /// The old place of a relocated block is shared until a walk has replaced it.
    pub shares_victims: bool,
    /// The new place of a relocated block is shared if the old one was.
    pub keeps_relocated_shared: bool,
    /// A reference is made to a new place only after a checkpoint that has it in use.
    pub refers_to_saved: bool,
    /// A segment is given back only after a durable checkpoint knows it to be empty.
    pub punches_after_checkpoint: bool,
    /// The places that a scrub reads are not used again meanwhile.
    pub protects_scrubbed: bool,
    /// A page with the number of a removed one was not visited by a scrub.
    pub forgets_scrubbed: bool,
    /// Pages of maps are written twice, if there is place.
    pub copies_pages: bool,
    /// A walk does not free the second copies of the pages that it meets.
    pub marks_copies: bool,
    /// What the guarantees of others need is not given to a batch, and no snapshot breaks one.
    pub keeps_guarantees: bool,
    /// The fewest adjoining blocks that are worth a seek.
    pub run_min: usize,
    /// The bits of fingerprints that count.
    pub fingerprint_bits: u32,
    /// The most pages that a step of a walk visits.
    pub walk_step: usize,
    /// The changed pages of maps for which there is room at least: in a small pool, these bound the
    /// changes in flight.
    pub dirty_pages_min: usize,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            compares_contents: true,
            goes_on_behind_gaps: true,
            is_serial: true,
            waits_for_checkpoint: true,
            waits_for_reads: true,
            snapshot_names_batches: true,
            names_failed: true,
            applies_at_once: true,
            record_names_batches: true,
            compares_generations: true,
            overwrites_later: true,
            marks_new: true,
            walks_copied: true,
            walks_between_checkpoints: true,
            raises_floor: true,
            copies_stale: true,
            keeps_removed: true,
            keeps_shared: true,
            pins_references: true,
            compares_equals: true,
            drops_contents: true,
            drops_references: true,
            takes_again: true,
            visits_copies: true,
            notes_changes: true,
            holds_relocated: true,
            shares_victims: true,
            keeps_relocated_shared: true,
            refers_to_saved: true,
            punches_after_checkpoint: true,
            protects_scrubbed: true,
            forgets_scrubbed: true,
            copies_pages: true,
            marks_copies: true,
            keeps_guarantees: true,
            run_min: 64,
            fingerprint_bits: 56,
            walk_step: 64,
            dirty_pages_min: 32,
        }
    }
}
