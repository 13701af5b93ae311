// cluster.h -- a block in its cluster: the barrier of all threads, and the shared memory of the others.
// SPDX-License-Identifier: Apache-2.0
//
// An address for loads has in its upper bits the rank, plus 1, of the block whose shared memory it points to; without
// them it is one of the own block.
//
// On a GPU threads that have ended count as arrived. Here a barrier that is left to fewer threads is a deadlock.
#ifndef CUATTN_SIMT_CLUSTER_H
#define CUATTN_SIMT_CLUSTER_H
#include "builtins.h"

namespace simt {

constexpr int OFFSET_BITS = 24;

// All lanes of a warp have to come by the same line.
inline void cluster_arrive(Place at) {
  warp_read(~0u, at, "barrier.cluster.arrive", 0, [](const Slot*) { return 0; });
  Cluster& c = *block->cluster;
  if (self->cluster_arrivals > self->cluster_waits) fail("barrier.cluster.arrive: twice without a wait between");
  self->cluster_arrivals++;
  if (++c.arrived < c.needed) return;
  c.arrived = 0;
  c.generation++;
}
inline void cluster_wait(Place at) {
  warp_read(~0u, at, "barrier.cluster.wait", 0, [](const Slot*) { return 0; });
  const Cluster& c = *block->cluster;
  if (self->cluster_arrivals == self->cluster_waits) fail("barrier.cluster.wait: without an arrival");
  wait_for({&c.generation, ~0ull, self->cluster_waits, "barrier.cluster.wait", &c.arrived, &c.needed});
  if (++self->cluster_waits > block->cluster_waits) block->cluster_waits = self->cluster_waits;
}

inline unsigned map_address(unsigned offset, unsigned rank) {
  const size_t size = block->cluster->blocks.size();
  if (rank >= size) fail("mapa: rank %u in a cluster of %zu blocks", rank, size);
  return (rank + 1) << OFFSET_BITS | offset;
}

// The block that an address points to. It must have begun, and may not end before a barrier behind this read.
inline const Block& owner_of(unsigned address, const char* what) {
  Cluster& c = *block->cluster;
  const unsigned window = address >> OFFSET_BITS;
  if (window > c.blocks.size())
    fail("%s: %08x is no address in a cluster of %zu blocks", what, address, c.blocks.size());
  Block& owner = window ? c.blocks[window - 1] : *block;
  if (&owner == block) return owner;
  if (block->cluster_waits == 0) {
    fail("%s: rank %d may not have begun, no thread of this block has waited for barrier.cluster", what, owner.rank);
  }
  if (owner.ended) fail("%s: rank %d has ended", what, owner.rank);
  const Word waits = self->cluster_arrivals + 1;
  if (waits > owner.last_read.waits) owner.last_read = {waits, block->rank, self->place};
  return owner;
}

}  // namespace simt

#endif
