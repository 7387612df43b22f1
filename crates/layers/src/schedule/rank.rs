//! The disk that is next, of those with a claim.
//!
//! A turn asks for the disk with the least tag, of a hundred or more, and changes the tag of one.
//! So the disks are the leaves of a tournament: each inner node has the winner of its two children.
//! The winner of all is at the root, and a change plays only the matches on the way from its leaf
//! to the root.

/// A claim. The claim with the least tag wins; of equal ones that with the least head, then the one
/// of the first lane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Claim {
    /// The tag of the disk.
    pub tag: f64,
    /// The least tag of its control groups with requests.
    pub head: f64,
    /// The lane with these requests.
    pub lane: usize,
}

impl Claim {
    /// The absence of a claim, which loses against all others.
    const NONE: Self = Self { tag: f64::INFINITY, head: f64::INFINITY, lane: usize::MAX };

    pub(super) fn is_before(&self, other: &Self) -> bool {
        (self.tag, self.head, self.lane) < (other.tag, other.head, other.lane)
    }
}

/// The claims of disks, by their indices.
#[derive(Debug)]
pub(super) struct Ranking {
    /// The claim of each disk. Their number is a power of two.
    claims: Vec<Claim>,
    /// The winners, as indices of claims: that of all at 1, those of node n's children at 2n and 2n
    /// + 1. The parents of the claims are the second half.
    winners: Vec<u32>,
    /// The number of claims.
    count: usize,
}

impl Default for Ranking {
    fn default() -> Self {
        Self { claims: vec![Claim::NONE; 2], winners: vec![0; 2], count: 0 }
    }
}

impl Ranking {
    /// The claim that is before all others.
    pub(super) fn first(&self) -> Option<Claim> {
        (self.count > 0).then(|| self.claims[self.winners[1] as usize])
    }

    /// The least tag of all claims; infinite without claims.
    pub(super) fn least(&self) -> f64 {
        self.first().map_or(f64::INFINITY, |first| first.tag)
    }

    /// Sets the claim of a disk.
    #[inline]
    pub(super) fn set(&mut self, index: usize, claim: Option<Claim>) {
        if index >= self.claims.len() {
            self.grow(index + 1);
        }
        let claim = claim.unwrap_or(Claim::NONE);
        let before = std::mem::replace(&mut self.claims[index], claim);
        if before != claim {
            self.count += usize::from(claim != Claim::NONE);
            self.count -= usize::from(before != Claim::NONE);
            self.play(index);
        }
    }

    /// Sets the tag of a disk, if it has a claim.
    #[inline]
    pub(super) fn set_tag(&mut self, index: usize, tag: f64) {
        if self.count == 0 {
            return;
        }
        if let Some(claim) = self.claims.get_mut(index).filter(|claim| **claim != Claim::NONE) {
            claim.tag = tag;
            self.play(index);
        }
    }

    /// Plays the matches of a changed claim.
    fn play(&mut self, index: usize) {
        let mut node = self.claims.len() / 2 + index / 2;
        // The parents of the claims compare two claims.
        let pair = index & !1;
        let mut winner = self.winner(pair as u32, pair as u32 + 1);
        loop {
            let before = std::mem::replace(&mut self.winners[node], winner);
            // Another disk has won before, and wins again.
            let is_same = before == winner && winner != index as u32;
            if node == 1 || is_same {
                return;
            }
            winner = self.winner(winner, self.winners[node ^ 1]);
            node /= 2;
        }
    }

    fn winner(&self, one: u32, other: u32) -> u32 {
        let is_before = self.claims[other as usize].is_before(&self.claims[one as usize]);
        if is_before { other } else { one }
    }

    fn grow(&mut self, count: usize) {
        let count = count.next_power_of_two();
        self.claims.resize(count, Claim::NONE);
        self.winners = vec![0; count];
        for node in (1..count).rev() {
            let (one, other) = if node >= count / 2 {
                (2 * node as u32 - count as u32, 2 * node as u32 - count as u32 + 1)
            } else {
                (self.winners[2 * node], self.winners[2 * node + 1])
            };
            self.winners[node] = self.winner(one, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_claim_is_that_of_a_search_through_all() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let disks = random.usize(1..130);
            let (mut ranking, mut all) = (Ranking::default(), vec![None; disks]);
            for _ in 0..500 {
                let index = random.usize(..disks);
                // Few values, so that many are equal.
                let tag = f64::from(random.u32(..6));
                if random.bool() {
                    ranking.set_tag(index, tag);
                    all[index] = all[index].map(|claim| Claim { tag, ..claim });
                } else {
                    let head = f64::from(random.u32(..3));
                    let lane = random.usize(..disks) * disks + index;
                    all[index] = random.bool().then_some(Claim { tag, head, lane });
                    ranking.set(index, all[index]);
                }
                let claims = all.iter().flatten();
                let first = claims.min_by(|one, other| {
                    let key = |claim: &Claim| (claim.tag, claim.head, claim.lane);
                    key(one).partial_cmp(&key(other)).expect("no NaN")
                });
                assert_eq!(ranking.first().as_ref(), first, "seed {seed}");
                let least = first.map_or(f64::INFINITY, |claim| claim.tag);
                assert_eq!(Some(ranking.least()), Some(least), "seed {seed}");
            }
        }
    }
}
