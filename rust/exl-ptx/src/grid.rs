//! A launch: its blocks, the order in which their warps take turns, and the detection of deadlocks.

use crate::asynchronous::{Event, happen};
use crate::card::Card;
use crate::code::Kernel;
use crate::memory::{Block, Named, Ranges};
use crate::warp::{OF_CLUSTER, Warp, lanes_of};

/// Instructions of all warps without any change of memory, barriers or blocks, after which a launch counts as stuck.
const STUCK: u64 = 3_000_000;

/// The shape of a launch.
#[derive(Clone, Debug)]
pub struct Launch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Blocks of a cluster along each dimension.
    pub cluster: [u32; 3],
    pub clustered: bool,
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    /// The parameters as the kernel reads them.
    pub params: Vec<u8>,
    pub number: u64,
    pub seed: u64,
    /// Whether a load of shared memory that was never written is an error. Otherwise it gives NaN: some kernels load padding.
    pub strict: bool,
}

#[derive(Clone, Debug, Default)]
pub struct ClusterBarrier {
    pub arrived: u32,
    pub generation: u64,
}

/// Everything that a running warp can reach besides itself.
pub struct World<'a> {
    pub kernel: &'a Kernel,
    pub launch: &'a Launch,
    pub card: &'a Card,
    pub ranges: &'a Ranges,
    /// The range of the last access.
    pub last: (u64, u64),
    /// The blocks of the running unit: a cluster, or one block.
    pub blocks: Vec<Block>,
    pub events: Vec<Event>,
    pub cluster: ClusterBarrier,
    /// The running warp's place in its unit.
    pub current: usize,
    /// Instructions of all warps so far, and at the last change.
    pub executed: u64,
    pub progress: u64,
    state: u64,
    landing: u32,
}

impl World<'_> {
    /// A number below `below`.
    pub fn random(&mut self, below: u32) -> u32 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        ((self.state >> 33) % u64::from(below)) as u32
    }

    /// Whether the next asynchronous copy lands at once.
    pub fn copies_land_early(&mut self) -> bool {
        match self.landing {
            0 => false,
            1 => self.random(2) == 0,
            _ => true,
        }
    }

    pub fn complete_cluster(&mut self) {
        let live: u32 = self.blocks.iter().map(|b| b.live).sum();
        if self.cluster.arrived >= live {
            self.cluster.arrived = 0;
            self.cluster.generation += 1;
            self.progress = self.executed;
        }
    }
}

/// Blocks that are scheduled together.
struct Unit {
    blocks: Vec<Block>,
    warps: Vec<Warp>,
    events: Vec<Event>,
    cluster: ClusterBarrier,
}

/// Numbers of a finished launch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Count {
    /// Instructions of warps.
    pub instructions: u64,
}

/// Run a kernel to its end.
pub fn run(
    kernel: &Kernel,
    launch: &Launch,
    card: &Card,
    ranges: &Ranges,
) -> Result<Count, String> {
    let threads: u32 = launch.block.iter().product();
    let shared = kernel.dynamic_at - crate::memory::SHARED_START + launch.shared_bytes as usize;
    check(kernel, launch, card, threads, shared)?;
    let cluster: u32 = launch.cluster.iter().product();
    let units: u64 =
        launch.grid.iter().map(|&n| u64::from(n)).product::<u64>() / u64::from(cluster);
    let resident = (card.resident(threads as usize, shared) / cluster as usize).max(1);
    let mut world = World {
        kernel,
        launch,
        card,
        ranges,
        last: (0, 0),
        blocks: Vec::new(),
        events: Vec::new(),
        cluster: ClusterBarrier::default(),
        current: 0,
        executed: 0,
        progress: 0,
        state: launch.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        landing: (launch.seed % 3) as u32,
    };
    let mut turns = 0u64;
    let mut idle = 0usize;
    let mut wanted = 1 + world.random(3) as usize;
    let mut active: Vec<Unit> = Vec::new();
    let mut next = 0u64;
    loop {
        while active.len() < wanted.min(resident) && next < units {
            active.push(unit(kernel, launch, threads, shared, next));
            next += 1;
        }
        if active.is_empty() {
            return Ok(Count {
                instructions: world.executed,
            });
        }
        turns += 1;
        if turns.is_multiple_of(512) {
            wanted += 1;
        }
        let which = world.random(active.len() as u32) as usize;
        let unit = &mut active[which];
        enter(&mut world, unit);
        let outcome = turn(&mut world, &mut unit.warps);
        leave(&mut world, unit);
        if outcome? {
            idle = 0;
        } else {
            idle += 1;
        }
        if unit.warps.iter().all(|w| w.live == 0) {
            finish(kernel, unit)?;
            active.swap_remove(which);
            continue;
        }
        let stuck = world.executed - world.progress > STUCK;
        if stuck || idle > 40 * active.len() + 40 {
            if active.len() < resident && next < units {
                wanted = wanted.max(active.len()) + 1;
                world.progress = world.executed;
                idle = 0;
                continue;
            }
            let how = if stuck {
                "nothing changes any more"
            } else {
                "no warp can run"
            };
            return Err(format!("deadlock: {how}{}", positions(kernel, &active)));
        }
    }
}

fn check(
    kernel: &Kernel,
    launch: &Launch,
    card: &Card,
    threads: u32,
    shared: usize,
) -> Result<(), String> {
    if launch.grid.contains(&0) || threads == 0 || threads > 1024 {
        return Err(format!(
            "grid {:?} of blocks {:?}",
            launch.grid, launch.block
        ));
    }
    if shared > card.shared_per_block {
        return Err(format!(
            "{shared} bytes of shared memory ({} static), a block of {} may have {}",
            kernel.static_shared, card.name, card.shared_per_block
        ));
    }
    if card.resident(threads as usize, shared) == 0 {
        return Err(format!(
            "no block of {threads} threads and {shared} bytes fits on an SM"
        ));
    }
    for axis in 0..3 {
        if !launch.grid[axis].is_multiple_of(launch.cluster[axis]) {
            return Err(format!(
                "grid {:?} in clusters of {:?}",
                launch.grid, launch.cluster
            ));
        }
    }
    Ok(())
}

fn enter(world: &mut World, unit: &mut Unit) {
    std::mem::swap(&mut world.blocks, &mut unit.blocks);
    std::mem::swap(&mut world.events, &mut unit.events);
    std::mem::swap(&mut world.cluster, &mut unit.cluster);
}

fn leave(world: &mut World, unit: &mut Unit) {
    enter(world, unit);
}

/// Let one warp of a unit run, or an event happen. Returns whether there was one.
fn turn(world: &mut World, warps: &mut [Warp]) -> Result<bool, String> {
    if !world.events.is_empty() && world.random(8) == 0 {
        let at = world.random(world.events.len() as u32) as usize;
        let event = world.events.swap_remove(at);
        happen(world, warps, event)?;
        return Ok(true);
    }
    let first = world.random(warps.len() as u32) as usize;
    for step in 0..warps.len() {
        let at = (first + step) % warps.len();
        warps[at].release(world);
        if warps[at].ready() == 0 {
            continue;
        }
        world.current = at;
        let quantum = match world.random(4) {
            0 => 1 + world.random(16),
            _ => 64 + world.random(256),
        };
        warps[at].run(world, quantum)?;
        return Ok(true);
    }
    if !world.events.is_empty() {
        let at = world.random(world.events.len() as u32) as usize;
        let event = world.events.swap_remove(at);
        happen(world, warps, event)?;
        return Ok(true);
    }
    Ok(false)
}

fn finish(kernel: &Kernel, unit: &Unit) -> Result<(), String> {
    if let Some(event) = unit.events.first() {
        return Err(format!(
            "all blocks of a unit have exited, but this has not happened yet: {event:?}"
        ));
    }
    let stores = unit.warps.iter().flat_map(|w| &w.stores).next();
    stores.map_or(Ok(()), |store| {
        Err(format!(
            "exit with a bulk store that was never waited for ({})",
            kernel.describe(store.pc)
        ))
    })
}

fn unit(kernel: &Kernel, launch: &Launch, threads: u32, shared: usize, number: u64) -> Unit {
    let [cx, cy, cz] = launch.cluster;
    let [gx, gy, _] = launch.grid;
    let (ux, uy) = (u64::from(gx / cx), u64::from(gy / cy));
    let origin = [
        (number % ux) as u32 * cx,
        (number / ux % uy) as u32 * cy,
        (number / (ux * uy)) as u32 * cz,
    ];
    let mut unit = Unit {
        blocks: Vec::new(),
        warps: Vec::new(),
        events: Vec::new(),
        cluster: ClusterBarrier::default(),
    };
    for rank in 0..cx * cy * cz {
        let index = [
            origin[0] + rank % cx,
            origin[1] + rank / cx % cy,
            origin[2] + rank / (cx * cy),
        ];
        for warp in 0..threads.div_ceil(32) {
            unit.warps
                .push(Warp::new(kernel, rank as usize, warp, threads - 32 * warp));
        }
        unit.blocks.push(Block {
            index,
            number: u64::from(index[0])
                + u64::from(gx) * (u64::from(index[1]) + u64::from(gy) * u64::from(index[2])),
            rank,
            shared: vec![0xff; shared],
            known: vec![0; shared],
            barriers: std::array::from_fn(|_| Named::default()),
            mbarriers: std::collections::HashMap::new(),
            threads,
            live: threads,
            reads: Vec::new(),
            writers: vec![0; if kernel.has_wgmma { shared } else { 0 }],
        });
    }
    unit
}

/// Positions of the warps of all running blocks, for a deadlock's message.
fn positions(kernel: &Kernel, active: &[Unit]) -> String {
    let mut text = String::new();
    let mut lines = 0;
    for unit in active {
        for warp in unit.warps.iter().filter(|w| w.live != 0) {
            let mut places: Vec<(u32, u32)> = Vec::new();
            for lane in lanes_of(warp.live) {
                match places.iter_mut().find(|(pc, _)| *pc == warp.pcs[lane]) {
                    Some((_, mask)) => *mask |= 1 << lane,
                    None => places.push((warp.pcs[lane], 1 << lane)),
                }
            }
            for (pc, mask) in places {
                lines += 1;
                if lines > 40 {
                    return text + "\n  ...";
                }
                let held = warp.held.iter().find(|held| held.mask & mask != 0);
                let how = match held {
                    Some(held) if held.id == OF_CLUSTER => "waits for the cluster".to_owned(),
                    Some(held) => {
                        let barrier = &unit.blocks[warp.block].barriers[held.id];
                        format!(
                            "waits at barrier {}: {} arrived of {}",
                            held.id,
                            barrier.arrived,
                            if barrier.expected == 0 {
                                unit.blocks[warp.block].live
                            } else {
                                barrier.expected
                            }
                        )
                    }
                    None if warp.waiting & mask != 0 => "waits for lanes of its warp".to_owned(),
                    None => "runs".to_owned(),
                };
                text += &format!(
                    "\n  block {:?} warp {} lanes {mask:#010x} {how} at {}",
                    unit.blocks[warp.block].index,
                    warp.number,
                    kernel.describe(pc)
                );
            }
        }
    }
    text
}
