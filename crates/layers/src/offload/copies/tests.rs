use super::*;

const SHIFT: u32 = 13;
const PARTS: usize = 2;

fn bytes(content: u8) -> Vec<u8> {
    vec![content; 1 << SHIFT]
}

fn block(number: u64) -> Range<u64> {
    number << SHIFT..(number + 1) << SHIFT
}

/// Begins to fill all of a block, which gets a slot.
fn begin(copies: &Copies, number: u64, victim: Option<u64>) -> Option<Fill> {
    copies.assign(number, victim);
    copies.begin_fill(&block(number), false)
}

#[test]
fn a_copy_is_used_only_if_its_block_was_not_changed_meanwhile() {
    let copies = Copies::new(&(8192..8192 + (4 << SHIFT)), SHIFT);
    assert_eq!(copies.begin_fill(&block(3), false), None, "the block has no slot");
    // A change that is in flight when the copy is begun.
    copies.begin_change(&block(3), true);
    assert_eq!(begin(&copies, 3, None), None);
    copies.end_change(&block(3));
    // One that begins, or begins and ends, meanwhile, whichever way.
    for is_past in [true, false] {
        let fill = begin(&copies, 3, None).unwrap();
        copies.begin_change(&(block(3).start + 512..block(3).start + 1024), is_past);
        if is_past {
            copies.end_change(&block(3));
        }
        assert!(!copies.end_fill(&fill, true));
    }
    // A long discard.
    let fill = begin(&copies, 3, None).unwrap();
    copies.begin_change(&(0..1 << 40), true);
    assert_eq!(begin(&copies, 2, None), None);
    copies.end_change(&(0..1 << 40));
    assert!(!copies.end_fill(&fill, true));
    assert_eq!(copies.len(), 0);
    let fill = begin(&copies, 3, None).unwrap();
    copies.note(&fill, &bytes(7));
    assert!(copies.end_fill(&fill, true));
    assert!(copies.begin_read(&block(3)).is_some());
}

/// What a change writes at home becomes valid if no other change was in flight.
#[test]
fn a_change_fills_the_copy_of_its_block() {
    let copies = Copies::new(&(0..2 << SHIFT), SHIFT);
    let part = block(1).start..block(1).start + GRANULE;
    copies.assign(1, None);
    assert!(copies.may_lack(&part));
    copies.begin_change(&part, true);
    let fill = copies.begin_fill(&part, true).unwrap();
    assert_eq!(copies.begin_fill(&block(1), true), None, "the slot is being filled");
    copies.end_change(&part);
    copies.note(&fill, &bytes(7)[..GRANULE as usize]);
    assert!(copies.end_fill(&fill, true));
    assert!(copies.begin_read(&block(1)).is_none() && copies.may_lack(&part));
    let read = copies.begin_read(&part).unwrap();
    assert!(copies.end_read(&read, Some(&bytes(7)[..GRANULE as usize])));
    // Two changes at the same time leave nothing that is known.
    copies.begin_change(&part, true);
    copies.begin_change(&part, true);
    assert_eq!(copies.begin_fill(&part, true), None);
    copies.end_change(&part);
    copies.end_change(&part);
    // Only whole parts are filled.
    let half = part.start..part.start + 512;
    assert_eq!(copies.begin_fill(&half, false), None);
    let fill = copies.begin_fill(&block(1), false).unwrap();
    assert!(copies.end_fill(&fill, true));
    assert!(!copies.may_lack(&part) && copies.begin_fill(&part, false).is_none());
    assert_eq!(copies.compare(&[1, 2]).shares, [1.0, 0.0]);
}

/// A read that uses a slot keeps it, and a wrong byte is found.
#[test]
fn a_slot_in_use_is_not_filled_again() {
    let copies = Copies::new(&(0..1 << SHIFT), SHIFT);
    let fill = begin(&copies, 0, None).unwrap();
    copies.note(&fill, &bytes(7));
    assert!(copies.end_fill(&fill, true));
    let read = copies.begin_read(&(512..1024)).unwrap();
    assert_eq!((read.offset, read.length, read.skip), (0, 4096, 512));
    copies.begin_change(&block(0), false);
    assert_eq!((copies.len(), begin(&copies, 0, None)), (0, None));
    assert_eq!(begin(&copies, 1, Some(0)), None);
    // The read began before the change.
    assert!(copies.end_read(&read, Some(&bytes(7)[..4096])));
    let fill = begin(&copies, 1, None).unwrap();
    copies.note(&fill, &bytes(8));
    assert!(copies.end_fill(&fill, true));
    let read = copies.begin_read(&block(1)).unwrap();
    let mut wrong = bytes(8);
    wrong[5000] ^= 1;
    assert!(!copies.end_read(&read, Some(&wrong)) && copies.len() == 0);
    assert_eq!(copies.counts.mismatches.load(Ordering::Relaxed), 1);
    // The slot is free again, and a copy leaves for another.
    let fill = begin(&copies, 2, None).unwrap();
    assert!(copies.end_fill(&fill, true));
    assert_eq!(begin(&copies, 4, None), None);
    assert!(begin(&copies, 4, Some(2)).is_some());
}

/// What fills a copy, and the part that it has; all of them for `None`.
#[derive(Clone, Copy)]
struct Filling {
    fill: Fill,
    number: u64,
    half: Option<usize>,
    is_change: bool,
}

/// Random changes, reads and copies: a copy in the index is always that of the newest content.
#[test]
#[expect(clippy::too_many_lines, reason = "one scenario")]
fn copies_are_never_old() {
    let (mut found, mut used) = ([0; 2], [0; 2]);
    for seed in 0..1000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let copies = Copies::new(&(0..3 << SHIFT), SHIFT);
        // Of the halves of each block.
        let mut versions = [[0_u8; PARTS]; 6];
        let (mut fills, mut in_flight, mut reads) = (Vec::new(), Vec::new(), Vec::new());
        let mut slots: HashMap<u64, [u8; PARTS]> = HashMap::new();
        let part = |number: u64, half: Option<usize>| {
            let start = block(number).start + half.unwrap_or(0) as u64 * GRANULE;
            start..start + half.map_or(1 << SHIFT, |_| GRANULE)
        };
        let content = |versions: &[u8]| {
            versions.iter().flat_map(|it| vec![*it; GRANULE as usize]).collect::<Vec<u8>>()
        };
        for _ in 0..400 {
            let (number, half) = (random.u64(..6), random.usize(..PARTS));
            let at = number as usize;
            match random.u8(..8) {
                0 => {
                    copies.begin_change(&part(number, Some(half)), true);
                    in_flight.push((number, half));
                }
                1 if !in_flight.is_empty() => {
                    let (number, half) = in_flight.swap_remove(random.usize(..in_flight.len()));
                    let version = &mut versions[number as usize][half];
                    *version = version.wrapping_add(1);
                    copies.end_change(&part(number, Some(half)));
                }
                2 => {
                    copies.begin_change(&part(number, Some(half)), false);
                    versions[at][half] = versions[at][half].wrapping_add(1);
                }
                3 => {
                    copies.assign(number, Some(random.u64(..6)));
                    let half = random.bool().then_some(half);
                    if let Some(fill) = copies.begin_fill(&part(number, half), false) {
                        fills.push(Filling { fill, number, half, is_change: false });
                    }
                }
                4 => {
                    let range = part(number, Some(half));
                    copies.begin_change(&range, true);
                    match copies.begin_fill(&range, true) {
                        Some(fill) => {
                            let half = Some(half);
                            fills.push(Filling { fill, number, half, is_change: true });
                        }
                        None => in_flight.push((number, half)),
                    }
                }
                5 if !fills.is_empty() => {
                    let Filling { fill, number, half, is_change } =
                        fills.swap_remove(random.usize(..fills.len()));
                    let newest = &mut versions[number as usize];
                    if let (true, Some(half)) = (is_change, half) {
                        newest[half] = newest[half].wrapping_add(1);
                        copies.end_change(&part(number, Some(half)));
                    }
                    let place = fill.offset >> SHIFT << SHIFT;
                    let is_read = |(_, at, read): &(CopyRead, u64, Range<usize>)| {
                        *at == place && half.is_none_or(|half| read.contains(&half))
                    };
                    assert!(!reads.iter().any(is_read), "the parts are used");
                    let halves = half.map_or(0..PARTS, |half| half..half + 1);
                    copies.note(&fill, &content(&newest[halves.clone()]));
                    slots.entry(place).or_default()[halves.clone()]
                        .copy_from_slice(&newest[halves]);
                    used[usize::from(is_change)] +=
                        u64::from(copies.end_fill(&fill, random.u8(..4) > 0));
                }
                6 => {
                    // A half, or all of it.
                    let half = random.bool().then_some(half);
                    if let Some(read) = copies.begin_read(&part(number, half)) {
                        let place = read.offset >> SHIFT << SHIFT;
                        let halves = half.map_or(0..PARTS, |half| half..half + 1);
                        let newest = &versions[at][halves.clone()];
                        assert_eq!(&slots[&place][halves.clone()], newest, "seed {seed}");
                        found[usize::from(half.is_some())] += 1;
                        reads.push((read, place, halves));
                    }
                }
                _ if !reads.is_empty() => {
                    let (read, place, halves) = reads.swap_remove(random.usize(..reads.len()));
                    assert!(copies.end_read(&read, Some(&content(&slots[&place][halves]))));
                }
                _ => {}
            }
        }
        let slots: HashSet<_> = fills.iter().map(|filling| filling.fill.slot).collect();
        assert_eq!(slots.len(), fills.len(), "each slot is filled once at a time");
    }
    assert!(found.iter().all(|count| *count > 100), "{found:?} reads of whole and half copies");
    assert!(used.iter().all(|count| *count > 100), "{used:?} fills by reads and by changes");
}

/// A change of a part leaves the rest, until half of the copy is lost.
#[test]
fn a_small_change_leaves_the_rest_of_a_copy() {
    let shift = 16;
    let copies = Copies::new(&(0..2 << shift), shift);
    copies.assign(1, None);
    let fill = copies.begin_fill(&copies.range(1), false).unwrap();
    assert!(copies.end_fill(&fill, true));
    let begin = 1 << shift;
    let is_there = |granules: Range<u64>| {
        let range = begin + granules.start * GRANULE..begin + granules.end * GRANULE;
        copies.begin_read(&range).inspect(|read| copies.abandon_read(read)).is_some()
    };
    assert!(is_there(0..16));
    // The end of granule 2, and granule 3.
    copies.begin_change(&(begin + 3 * GRANULE - 512..begin + 4 * GRANULE), false);
    assert!(is_there(0..2) && is_there(4..16));
    assert!(!is_there(2..3) && !is_there(3..4) && !is_there(0..16));
    assert_eq!(copies.len(), 1);
    assert!(copies.compare(&[1]).lacking.is_empty());
    // It is made again in the background when half of it is gone.
    copies.begin_change(&(begin + 8 * GRANULE..begin + 14 * GRANULE), false);
    assert_eq!(copies.compare(&[1]).lacking, [1]);
    assert!(is_there(0..2));
    let fill = copies.begin_fill(&copies.range(1), false).unwrap();
    assert!(!is_there(0..1));
    assert!(copies.end_fill(&fill, true) && is_there(0..16));
    copies.begin_change(&(0..2 << shift), false);
    assert_eq!((copies.len(), copies.compare(&[]).others), (0, vec![1]));
    copies.begin_change(&(0..1 << 40), false);
    assert!(copies.compare(&[]).others.is_empty());
}
