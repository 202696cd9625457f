// Reads rows of a kvemb table over node-redis. What every step means: docs/storage-format.md. How to run it: ../README.md.
import { createHash } from "node:crypto";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { createClient, RESP_TYPES } from "redis";

const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const CODES = { "lost node": 3, "stale map": 4, "wrong record": 5 };
const u64 = (value) => BigInt.asUintN(64, value);
class Failure extends Error {
  constructor(why, what) { super(what); this.why = why; }
}
const lost = (what) => new Failure("lost node", what);

// --- msgpack. A map keeps the bytes of its pairs in `raw`, under their names, and its own under "".
function unpack(data, at = 0) { // [value, where it ends]
  const c = data[at++];
  const sized = (width) => [Number(data.readUIntBE(at, width)), (at += width)][0];
  const list = (n) => Array.from({ length: n }, () => { let value; [value, at] = unpack(data, at); return value; });
  const bytes = (n) => { if (at + n > data.length) throw new Failure("wrong record", "a value is cut off"); return data.subarray(at, (at += n)); };
  const map = (n) => {
    const found = { raw: {} };
    for (const first = at; n--;) {
      const [name, middle] = unpack(data, at);
      [found[name], at] = unpack(data, middle);
      found.raw[name] = data.subarray(middle, at);
      found.raw[""] = data.subarray(first, at);
    }
    return found;
  };
  if (c < 0x80) return [c, at];
  if (c < 0x90) return [map(c & 15), at];
  if (c < 0xa0) return [list(c & 15), at];
  if (c < 0xc0) return [bytes(c & 31).toString(), at];
  if (c >= 0xe0) return [c - 256, at];
  const kinds = {
    0xc0: () => null, 0xc2: () => false, 0xc3: () => true, 0xc4: () => bytes(sized(1)), 0xc5: () => bytes(sized(2)), 0xc6: () => bytes(sized(4)),
    0xcb: () => bytes(8).readDoubleBE(), 0xcc: () => sized(1), 0xcd: () => sized(2), 0xce: () => sized(4), 0xcf: () => bytes(8).readBigUInt64BE(),
    0xd9: () => bytes(sized(1)).toString(), 0xda: () => bytes(sized(2)).toString(), 0xdc: () => list(sized(2)), 0xdd: () => list(sized(4)),
  };
  if (!kinds[c]) throw new Failure("wrong record", "a value of the cluster is damaged, or of another release");
  const value = kinds[c]();
  return [value, at];
}
function decode(data, magic, least, most) {
  const [found] = unpack(data);
  if (!Array.isArray(found) || found[0] !== magic || !(found[1] >= least && found[1] <= most)) throw new Failure("wrong record", `${magic}: damaged, or of another release`);
  return found;
}
const text = (name) => Buffer.concat([Buffer.from([0xa0 | name.length]), Buffer.from(name)]);
function number(value) {
  const [head, width] = value < 128 ? [value, 0] : value < 256 ? [0xcc, 1] : value < 65536 ? [0xcd, 2] : [0xce, 4];
  const out = Buffer.from([head, ...Array(width)]);
  if (width) out.writeUIntBE(value, 1, width);
  return out;
}
function blob(data) {
  const head = data.length < 256 ? [0xc4, 1] : data.length < 65536 ? [0xc5, 2] : [0xc6, 4];
  const out = Buffer.from([head[0], ...Array(head[1])]);
  out.writeUIntBE(data.length, 1, head[1]);
  return Buffer.concat([out, data]);
}
function digest64(...parts) { // text, bytes, and integers from 0 to 127
  const hash = createHash("blake2b512");
  for (const part of parts) {
    const data = typeof part === "number" ? Buffer.from([part]) : Buffer.from(part);
    const length = Buffer.alloc(8);
    length.writeBigUInt64LE(BigInt(data.length));
    hash.update(typeof part === "string" ? "s" : typeof part === "number" ? "i" : "b").update(length).update(data);
  }
  return hash.digest().readBigUInt64LE();
}
function mix64(z) {
  z = u64((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
  z = u64((z ^ (z >> 27n)) * 0x94d049bb133111ebn);
  return z ^ (z >> 31n);
}
const slotTags = []; // of every slot the first text of three characters that CRC16 puts there
for (let n = (1 << 18) - 1; n >= 0; n--) {
  const tag = ALPHABET[n >> 12] + ALPHABET[(n >> 6) & 63] + ALPHABET[n & 63];
  let crc = 0;
  for (let bit = 0; bit < 24; bit++) crc = ((crc << 1) & 0xffff) ^ (((crc >> 15) ^ (tag.charCodeAt(bit >> 3) >> (7 - (bit & 7)))) & 1 ? 0x1021 : 0);
  slotTags[crc % 16384] = tag;
}

class Table {
  constructor(d) {
    if (d.num_ids !== undefined) throw new Failure("wrong record", "the table has num_ids: its rows lie in pages, which this program does not read");
    const { kind, raw } = d.optimizer, options = [], names = ["name", "dim", "dtype", "id_dtype", "optimizer", "initializer", "seed", "reduce", "life"];
    const momentum = d.optimizer.momentum > 0, transforms = d.optimizer.transforms ?? [];
    if (raw.momentum) options.push(text("momentum"), Buffer.from([momentum ? 0xc3 : 0xc2]));
    for (const name of ["nesterov", "amsgrad", "centered", "initial_accumulator_value"]) if (raw[name]) options.push(text(name), raw[name]);
    const pairs = [text("kind"), raw.kind, text("options"), Buffer.from([0x80 | (options.length / 2)]), ...options];
    const optimizer = [Buffer.from([0x83]), ...pairs, text("transforms"), Buffer.from([0x90 | transforms.length]), ...transforms.map((one) => one.raw.kind)];
    const begin = d.initializer.raw, initializer = [Buffer.from([0x80 | Object.keys(begin).length]), begin[""], text("algorithm"), number(d.init_algorithm ?? 1)];
    const made = { ...d.raw, optimizer: Buffer.concat(optimizer), initializer: Buffer.concat(initializer), n_buckets: number(d.n_buckets ?? 256) };
    const there = [...names, "n_buckets"].filter((name) => made[name]);
    this.schema = digest64("schema", Buffer.concat([Buffer.from([0x80 | there.length]), ...there.flatMap((name) => [text(name), made[name]])])) & 255n;
    this.checkKey = digest64("id check", d.name);
    const tag = digest64("table tag", d.name, d.tag_attempt);
    this.tag = [58n, 52n, 46n].map((shift) => ALPHABET[Number((tag >> shift) & 63n)]).join("");
    this.bits = Math.log2(d.n_buckets ?? 256);
    const state = { sgd: 0, adagrad: 1, rmsprop: 1 }[kind] ?? 2;
    const perRow = (state + momentum + !!d.optimizer.amsgrad + !!d.optimizer.centered) * d.dim;
    Object.assign(this, { dim: d.dim, dtype: d.dtype, rowBytes: d.dim * (d.dtype === "float32" ? 4 : 2) });
    this.sizeBytes = 12 + this.rowBytes + 4 * (kind === "rowwise_adagrad" ? 1 : perRow);
  }
  place(id) { // its slot, its bucket's key and its field
    const bucket = Number(mix64(id) >> BigInt(64 - this.bits)), spare = 2 ** (this.bits - 14);
    const slot = this.bits <= 14 ? bucket / spare : Math.floor(bucket / spare), sub = bucket % spare, field = Buffer.alloc(8);
    field.writeBigUInt64LE(id);
    const more = this.bits > 14 ? ALPHABET[sub >> 12] + ALPHABET[(sub >> 6) & 63] + ALPHABET[sub & 63] : "";
    return { slot, key: `${this.tag}{${slotTags[slot]}}${more}`, field };
  }
  row(record) { // its float32 values, least significant byte first
    const out = Buffer.alloc(4 * this.dim);
    for (let i = 0; i < this.dim; i++) {
      const bits = this.dtype === "float32" ? record.readUInt32LE(12 + 4 * i) : record.readUInt16LE(12 + 2 * i);
      const exponent = (bits >> 10) & 31, fraction = bits & 1023;
      if (this.dtype === "float32") out.writeUInt32LE(bits, 4 * i);
      else if (this.dtype === "bfloat16") out.writeUInt16LE(bits, 4 * i + 2);
      else out.writeFloatLE((bits >> 15 ? -1 : 1) * (exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24), 4 * i);
    }
    return out.toString("hex");
  }
}

class Reader {
  constructor(seeds, table) { Object.assign(this, { seeds, name: table, nodes: new Map() }); }
  forget() {
    for (const node of this.nodes.values()) if (node.client.isOpen) node.client.destroy();
    this.nodes.clear();
  }
  async within(promise, share = 1) { // of the time until the deadline
    const stop = new AbortController();
    const late = sleep(Math.max(1, (this.deadline - performance.now()) * share), null, { signal: stop.signal });
    late.catch(() => {});
    promise.catch(() => {});
    return Promise.race([promise, late.then(() => { throw new Error("no answer in time"); })]).finally(() => stop.abort());
  }
  async opened(address) { // marker, map and registry are read, and judged where they are used
    if (this.nodes.has(address)) return this.nodes.get(address);
    const [, host, port] = address.match(/^(.*):(\d+)$/);
    // One connection for all of a batch, never a new one in its middle: a marker vouches for the connection that it was read on.
    const client = createClient({ socket: { host, port: Number(port), reconnectStrategy: false }, disableOfflineQueue: true });
    const ask = (words) => client.sendCommand(words, { typeMapping: { [RESP_TYPES.BLOB_STRING]: Buffer } }); // replies as bytes
    const node = { address, client, ask };
    this.nodes.set(address, node);
    client.on("error", (error) => { node.error ??= error; });
    try {
      await this.within(client.connect(), 0.5);
      const asked = [["INFO", "server"], ...["marker", "map", "tables"].map((name) => ["GET", `kvemb:${name}`])].map(ask);
      [node.info, node.marker, node.map, node.tables] = await this.within(Promise.all(asked), 0.5);
    } catch (error) {
      node.error ??= error;
    }
    return node;
  }
  async load() { // the newest map and registry that any node has
    this.map = this.identity = null;
    let registry = null;
    const addresses = [...this.seeds];
    for (const address of addresses) { // which grows: nodes that a map names come behind the seeds
      const node = await this.opened(address);
      if (node.marker) node.says = decode(node.marker, "kvemb-marker", 5, 6);
      this.identity ??= node.says;
      const tables = node.tables && decode(node.tables, "kvemb-tables", 1, 2), map = node.map && decode(node.map, "kvemb-map", 2, 3);
      if (tables && !(registry?.[2] >= tables[2])) registry = tables;
      if (map && !(this.map?.[2] >= map[2])) this.map = map;
      for (const [place, saidBy] of map?.[8] ?? []) if (saidBy !== "gone" && !addresses.includes(place)) addresses.push(place);
    }
    if (!this.map || !this.identity) throw lost("no node that answers has a marker, or a cluster map");
    const [, , , serial, , ofNodes, , ofShards, , , plan] = this.map;
    this.owners = new Array(16384);
    for (let i = 0; i < ofNodes.length; i += 4) this.owners.fill(ofNodes.readUInt16LE(i + 2), ofNodes.readUInt16LE(i));
    const digest = (...of) => `${of[0]} ${digest64("cluster map", Buffer.concat([Buffer.from([0x93]), number(of[0]), blob(of[1]), blob(of[2])]))}`;
    this.placements = [digest(serial, ofNodes, ofShards)];
    if (["flipped", "serving"].includes(plan?.[1])) // the plan has the former owners
      this.placements.push(plan[0] === "nodes" ? digest(serial - 1, plan[2], ofShards) : digest(serial - 1, ofNodes, plan[2]));
    const definition = registry?.[3].find((one) => one.name === this.name);
    if (!definition) throw new Failure("wrong record", `there is no table ${this.name}`);
    this.table = new Table(definition);
  }
  judge(node, marker, number) { // may rows of node `number` be taken from there?
    const where = `node ${node.address}: `;
    if (node.error) throw lost(where + node.error.message);
    if (!marker) throw lost(`${where}its marker is gone: the server was emptied, and its rows are lost there`);
    const [, , cluster, index, generation, digest, serial, runId, , repairing] = decode(marker, "kvemb-marker", 5, 6);
    if (!cluster.equals(this.identity[2]) || index !== number) throw lost(`${where}is not node ${number}`);
    if (!this.placements.includes(`${serial} ${digest}`)) throw new Failure("stale map", `${where}follows serial ${serial}, this program ${this.map[3]}`);
    if (!generation.equals(this.identity[4])) throw lost(`${where}was emptied and provisioned again`);
    if (repairing) throw lost(`${where}its rows are being brought back`);
    if (!node.info.toString().includes(`run_id:${runId}`)) throw lost(`${where}was started again, its rows may be old`);
  }
  async nodeOf(number) { // proven by its marker, else where the map says
    const proven = [...this.nodes.values()].find((node) => node.says?.[3] === number && node.says[2].equals(this.identity[2]));
    if (!proven && !this.map[8][number]) throw lost(`node ${number}: it is not at any of these addresses`);
    const node = proven ?? (await this.opened(this.map[8][number][0]));
    this.judge(node, node.marker, number);
    return node;
  }
  async pull(ids) {
    const shares = new Map(), rows = [];
    for (const [at, id] of ids.entries()) {
      const { slot, key, field } = this.table.place(id), number = this.owners[slot];
      if (!shares.has(number)) shares.set(number, { node: await this.nodeOf(number), asked: [] });
      shares.get(number).asked.push({ at, id, words: ["HGET", key, field] });
    }
    const replies = [...shares.values()].map(({ node, asked }) => Promise.all([...asked.map((one) => one.words), ["GET", "kvemb:marker"]].map(node.ask)));
    for (const reply of replies) reply.catch(() => {}); // it is looked at below, after its time
    for (const [at, [number, { node, asked }]] of [...shares].entries()) {
      const found = await this.within(replies[at]).catch((error) => { throw lost(`node ${node.address}: ${error.message}`); });
      const marker = found.pop(); // read behind all rows of this connection: it vouches for them
      if (!marker?.equals(node.marker)) {
        this.judge(node, marker, number);
        throw new Failure("stale map", `node ${node.address}: its marker was renewed`);
      }
      for (const [i, { at, id }] of asked.entries()) rows[at] = { record: found[i], id, node };
    }
    return rows.map(({ record, id, node }) => {
      if (!record) return null;
      const word = ((mix64(id ^ this.table.checkKey) >> 40n) << 8n) | this.table.schema;
      if (record.length !== this.table.sizeBytes || BigInt(record.readUInt32LE()) !== word)
        throw new Failure("wrong record", `node ${node.address}: the value of id ${id} is not this row's record`);
      return record;
    });
  }
}

const [addresses, table, timeout = "5"] = process.argv.slice(2);
if (!table) {
  console.error("usage: reader HOST:PORT,HOST:PORT TABLE [TIMEOUT_S] < lines of ids");
  process.exit(2);
}
const reader = new Reader(addresses.split(","), table);
for await (const line of createInterface({ input: process.stdin })) {
  const texts = line.split(" ").filter(Boolean), ids = texts.map((one) => u64(BigInt(one)));
  if (texts.some((one) => BigInt(one) !== BigInt.asIntN(64, BigInt(one)) && BigInt(one) !== u64(BigInt(one)))) throw new RangeError("an id has 64 bits");
  reader.deadline = performance.now() + 1000 * Number(timeout);
  for (let nLost = 0; ids.length;) {
    try {
      if (!reader.nodes.size) await reader.load();
      const rows = await reader.pull(ids);
      const shown = rows.map((record, at) => record
        ? `{"id": ${texts[at]}, "epoch": ${record.readUInt16LE(10)}, "k": ${record.readUIntLE(4, 6)}, "row": "${reader.table.row(record)}"}\n`
        : `{"id": ${texts[at]}, "missing": true}\n`);
      process.stdout.write(shown.join(""));
      break;
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      const over = performance.now() > reader.deadline || (error.why !== "stale map" && nLost++ > 0);
      console.error(`${error.why}: ${error.message}${over ? "" : "; reading the map again"}`);
      reader.forget();
      if (over) process.exit(CODES[error.why]);
      await sleep(20);
    }
  }
}
reader.forget();
