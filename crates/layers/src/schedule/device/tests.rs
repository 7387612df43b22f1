//! The decisions of a turn by seed, against a search through all lanes and disks.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use fathom_block::{
    Capabilities, Clock, Crossing, Disk, DiskOptions, Layer, LayerPart, LayerQueue, OpenContext,
    Outcome, Request, Stack,
};
use fathom_reactor::Reactor;
use parking_lot::Mutex;

use super::*;
use crate::schedule::state::RECENT_NS;

const MS: u64 = 1_000_000;

/// A layer whose waker is that of the lanes.
#[derive(Default)]
struct Probe(Mutex<Option<Waker>>);

struct ProbeQueue;

impl Layer for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        *self.0.lock() = Some(context.waker()?);
        Ok(LayerPart::queue(ProbeQueue))
    }
}

impl LayerQueue for ProbeQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}

/// A waker, and the queue that it belongs to.
fn waker() -> (Waker, Stack, Reactor) {
    let probe = Arc::new(Probe::default());
    let layers: Vec<Arc<dyn Layer>> = vec![Arc::<Probe>::clone(&probe)];
    let backend = Arc::new(fathom_backend::Null::new(1 << 20));
    let disk = Disk::new(DiskOptions::default(), layers, backend).unwrap();
    let mut reactor = Reactor::new(8).unwrap();
    let clock = Clock::Simulated(Rc::new(Cell::new(0)));
    let stack = disk.open_queue(&mut reactor, clock).unwrap();
    let waker = probe.0.lock().take().unwrap();
    (waker, stack, reactor)
}

fn is_responsive(entry: &Entry, now_ns: u64) -> bool {
    entry.called_ns == 0 || now_ns < entry.called_ns.saturating_add(PATIENCE_NS)
}

/// The least tag of the other disks with waited-for requests.
fn least_waiting(state: &State, member: usize, now_ns: u64) -> Option<f64> {
    let others = state.members.iter().enumerate().filter(|(index, other)| {
        let is_recent = now_ns < other.waited_ns.saturating_add(RECENT_NS);
        let is_waiting = other.flight[WAITED] > 0 || other.waiting > 0 || is_recent;
        *index != member && other.is_used && is_waiting
    });
    others.map(|(_, other)| other.tag).min_by(f64::total_cmp)
}

fn must_yield(state: &State, lane: usize, flow: Flow, now_ns: u64) -> bool {
    let own = &state.lanes[lane];
    let member = &state.members[own.member];
    state.lanes.iter().enumerate().any(|(index, other)| {
        if index == lane || !is_responsive(other, now_ns) {
            return false;
        }
        let tag = state.members[other.member].tag;
        match (other.waiting, other.burst) {
            (Some(head), _) if other.member == own.member => {
                head + LEAD < member.group_tag(flow.key)
            }
            (Some(_), _) => tag + LEAD < member.tag,
            (None, Some(behind)) if other.member != own.member && state.has_burst_room() => {
                tag + behind + LEAD < member.tag
            }
            _ => false,
        }
    })
}

fn next(state: &State, now_ns: u64, is_claim: bool) -> Option<usize> {
    let is_candidate = |entry: &Entry| {
        let may_burst = |behind: f64| {
            let least = least_waiting(state, entry.member, now_ns);
            state.may_burst(entry.member, behind, least)
        };
        if is_claim {
            entry.waiting.is_some() || state.has_burst_room() && entry.burst.is_some_and(may_burst)
        } else {
            entry.held > 0
        }
    };
    let rank = |lane: &usize| {
        let entry = &state.lanes[*lane];
        let head = if is_claim { entry.waiting.unwrap_or(0.0) } else { 0.0 };
        let is_due = entry.waiting.is_none() && entry.burst == Some(f64::NEG_INFINITY);
        let tag = state.members[entry.member].tag;
        (if is_claim && is_due { f64::NEG_INFINITY } else { tag }, head, *lane)
    };
    let lanes = (0..state.lanes.len()).filter(|lane| {
        let entry = &state.lanes[*lane];
        entry.is_used && is_candidate(entry) && is_responsive(entry, now_ns)
    });
    lanes.min_by(|one, other| rank(one).partial_cmp(&rank(other)).unwrap())
}

/// Compares all decisions at a time.
fn check(state: &mut State, seed: u64, now_ns: u64) {
    // What the guard holds back is left out by both.
    let guard = std::mem::take(&mut state.guard);
    let active = state.members.iter().filter(|member| member.is_used && member.is_active());
    let least = active.map(|member| member.tag).fold(f64::INFINITY, f64::min);
    assert_eq!(Some(state.order.active.least()), Some(least), "seed {seed}");
    for is_claim in [true, false] {
        let found = state.next(now_ns, is_claim);
        assert_eq!(found, next(state, now_ns, is_claim), "seed {seed}, claim {is_claim}");
    }
    for lane in 0..state.lanes.len() {
        if !state.lanes[lane].is_used {
            continue;
        }
        // The lane whose turn it is has answered.
        let was_called_ns = state.lanes[lane].called_ns;
        state.answer(lane);
        for key in [0, 1, 2] {
            let flow = Flow { key, weight: 100 };
            let found = state.must_yield(lane, flow);
            assert_eq!(found, must_yield(state, lane, flow, now_ns), "seed {seed}, lane {lane}");
        }
        state.lanes[lane].called_ns = was_called_ns;
        if was_called_ns > 0 {
            state.order.called_ns = state.order.called_ns.min(was_called_ns);
            state.silence(now_ns);
        }
    }
    state.guard = guard;
}

/// What a lane does in a turn, by seed.
fn act(gate: &mut Gate<'_>, random: &mut fastrand::Rng) -> Rest {
    let mut flow = Flow { key: random.u32(..3), weight: 100 };
    for _ in 0..random.u32(..3) {
        // Few lengths, so that many tags are equal.
        let bytes = 4096 << (3 * random.u32(..3));
        match random.u8(..5) {
            0 => gate.pass(BACKGROUND, bytes, Flow::WHOLE),
            1 => _ = gate.admit_step(|| 4096),
            2 => _ = gate.admit_burst(bytes, cost(bytes)),
            _ => _ = gate.admit(bytes, flow),
        }
        flow.key = random.u32(..3);
    }
    let waiting = random.bool().then(|| gate.tag(flow));
    let held = if random.bool() { random.usize(1..5) } else { 0 };
    let burst = if random.u8(..4) == 0 { f64::NEG_INFINITY } else { cost(random.u64(..1 << 20)) };
    let held_cost = cost(held as u64 * 4096);
    Rest { waiting, held, held_cost, burst: (held > 0 && random.bool()).then_some(burst) }
}

#[test]
fn decisions_are_those_of_a_search_through_all_lanes() {
    let (waker, _stack, _reactor) = waker();
    let mut calls = 0;
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let device = Arc::new(Device::new(random.u32(1..12)));
        let mut lanes: Vec<Lane> = Vec::new();
        let mut now_ns = 1000 * MS;
        let disks_max = random.usize(2..9);
        for _ in 0..1500 {
            now_ns += if random.u8(..20) == 0 { 15 * MS } else { random.u64(..MS) };
            if lanes.is_empty() || random.u8(..100) == 0 && lanes.len() < 4 * disks_max {
                // Another queue of a disk, or another disk.
                let place = match random.choice(&lanes) {
                    Some(lane) if random.bool() => Arc::clone(&lane.place),
                    _ => Arc::new(device.join(random.u32(1..4) * 100)),
                };
                lanes.push(Lane::new(place, waker.clone()));
            } else if random.u8(..150) == 0 {
                lanes.swap_remove(random.usize(..lanes.len()));
                continue;
            }
            let index = random.usize(..lanes.len());
            let lane = &mut lanes[index];
            let class = random.usize(..2);
            let completed = (lane.flight[class] > 0 && random.bool()).then(|| {
                let bytes = lane.bytes / u64::from(lane.flight[0] + lane.flight[1]);
                lane.end(class, bytes, now_ns);
                Completed { class, is_step: false, begun_ns: now_ns - 1, bytes: 4096 }
            });
            let turn = lane.turn(now_ns, completed, |gate| act(gate, &mut random));
            calls += usize::from(turn.call.is_some());
            device.state.access(|state| check(state, seed, now_ns));
        }
    }
    assert!(calls > 1000, "lanes call each other: {calls}");
}

#[test]
fn a_device_is_quiet_since_the_last_completion_although_no_lane_took_a_turn() {
    let (waker, _stack, _reactor) = waker();
    let device = Arc::new(Device::new(8));
    let place = Arc::new(device.join(100));
    let mut lanes = [(); 3].map(|()| Lane::new(Arc::clone(&place), waker.clone()));
    lanes[0].check(1000 * MS);
    for (index, end_ns) in [(0, 1007 * MS), (1, 1004 * MS)] {
        lanes[index].begin(WAITED, 0);
        lanes[index].end(WAITED, 0, end_ns);
    }
    let [first, _second, mut third] = lanes;
    drop(first);
    let rest = Rest { held: 1, held_cost: cost(4096), ..Rest::default() };
    third.turn(1190 * MS, None, |_| rest);
    assert_eq!(device.state.access(|state| state.quiet_ns), 1007 * MS);
}
