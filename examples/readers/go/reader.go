// Reads rows of a kvemb table over redigo. What every step means: docs/storage-format.md. How to build and run it: ../README.md.
package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"math/bits"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/gomodule/redigo/redis"
	"golang.org/x/crypto/blake2b"
)

const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
const lostNode, staleMap, wrongRecord = "lost node", "stale map", "wrong record"

var codes = map[string]int{lostNode: 3, staleMap: 4, wrongRecord: 5}

type failure struct{ why, what string }

func fail(why, format string, values ...any) { panic(failure{why, fmt.Sprintf(format, values...)}) }

// --- msgpack. A value is nil, bool, uint64 (negative: as its bits), float64, string, []byte, []item or map[string]item.
type item struct {
	value any
	raw   []byte // its bytes
	body  []byte // of a list or map: without its head
}

func (it item) list() []item          { l, _ := it.value.([]item); return l }
func (it item) get(name string) item  { m, _ := it.value.(map[string]item); return m[name] }
func (it item) number() uint64        { n, _ := it.value.(uint64); return n }
func (it item) text() string          { s, _ := it.value.(string); return s }
func (it item) bytes() []byte         { b, _ := it.value.([]byte); return b }
func (it item) is(wanted bool) bool   { b, ok := it.value.(bool); return ok && b == wanted }
func (it item) at(index int) (i item) { return it.list()[index] }

const kinds, widths = "0?ttbbb???ffiiiiiiii?????sssaamm", "00001240004812481248000001242424" // of the heads from 0xc0 to 0xdf

func unpack(data []byte) item {
	c, at, n, kind := data[0], 1, uint64(0), byte('i')
	switch {
	case c < 0x80 || c >= 0xe0:
		n = uint64(int8(c))
	case c < 0x90:
		kind, n = 'm', uint64(c&15)
	case c < 0xa0:
		kind, n = 'a', uint64(c&15)
	case c < 0xc0:
		kind, n = 's', uint64(c&31)
	default:
		kind = kinds[c-0xc0]
		for at = 1; at <= int(widths[c-0xc0]-'0'); at++ {
			n = n<<8 | uint64(data[at])
		}
	}
	head, it := at, item{}
	switch kind {
	case 'i':
		it.value = n
	case 'f':
		it.value = math.Float64frombits(n)
	case 't':
		it.value = c == 0xc3
	case 's':
		it.value, at = string(data[at:at+int(n)]), at+int(n)
	case 'b':
		it.value, at = data[at:at+int(n)], at+int(n)
	case 'a':
		list := []item{}
		for ; n > 0; n-- {
			list = append(list, unpack(data[at:]))
			at += len(list[len(list)-1].raw)
		}
		it.value = list
	case 'm':
		found := map[string]item{}
		for ; n > 0; n-- {
			name := unpack(data[at:])
			found[name.text()] = unpack(data[at+len(name.raw):])
			at += len(name.raw) + len(found[name.text()].raw)
		}
		it.value = found
	case '?':
		fail(wrongRecord, "a value of the cluster is of another release")
	}
	it.raw, it.body = data[:at], data[head:at]
	return it
}

func decode(data []byte, magic string, least, most uint64, fields int) (it item) {
	defer func() {
		if recover() != nil || it.at(0).text() != magic || it.at(1).number() < least || it.at(1).number() > most || len(it.list()) < fields {
			fail(wrongRecord, "%s: damaged, or of another release", magic)
		}
	}()
	return unpack(data)
}

func text(name string) []byte { return append([]byte{0xa0 | byte(len(name))}, name...) }

func number(value uint64) []byte {
	for _, width := range []int{1, 2, 4, 8} {
		if value < 128 {
			return []byte{byte(value)}
		} else if width == 8 || value < 1<<(8*width) {
			return append([]byte{0xcc + byte(bits.TrailingZeros(uint(width)))}, binary.BigEndian.AppendUint64(nil, value)[8-width:]...)
		}
	}
	return nil
}

func digest64(parts ...any) uint64 { // string, []byte, and int from 0 to 127
	var all []byte
	for _, part := range parts {
		kind, data := byte('b'), []byte(nil)
		switch value := part.(type) {
		case string:
			kind, data = 's', []byte(value)
		case int:
			kind, data = 'i', []byte{byte(value)}
		case []byte:
			data = value
		}
		all = append(append(binary.LittleEndian.AppendUint64(append(all, kind), uint64(len(data)))), data...)
	}
	sum := blake2b.Sum512(all)
	return binary.LittleEndian.Uint64(sum[:])
}

func mix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

var slotTags = func() (tags [16384]string) { // of every slot the first text of three characters that CRC16 puts there
	for n := 1<<18 - 1; n >= 0; n-- {
		tag, crc := string([]byte{alphabet[n>>12], alphabet[n>>6&63], alphabet[n&63]}), uint16(0)
		for bit := 0; bit < 24; bit++ {
			if crc>>15^uint16(tag[bit/8]>>(7-bit%8)&1) == 1 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
		tags[crc%16384] = tag
	}
	return
}()

type table struct {
	tag, dtype       string
	bits, dim, width int // of the number of buckets; weights of a row; bytes of a weight
	checkKey, schema uint64
	sizeBytes        int
}

func newTable(d item) table {
	if d.get("num_ids").raw != nil {
		fail(wrongRecord, "the table has num_ids: its rows lie in pages, which this program does not read")
	}
	made, optimizer, initializer := map[string][]byte{}, d.get("optimizer"), d.get("initializer")
	for _, name := range []string{"name", "dim", "dtype", "id_dtype", "seed", "reduce", "life"} {
		made[name] = d.get(name).raw
	}
	momentum, _ := optimizer.get("momentum").value.(float64)
	var options []byte
	n, state := byte(0), map[string]int{"sgd": 0, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2, "ftrl": 2}[optimizer.get("kind").text()]
	for _, name := range []string{"momentum", "nesterov", "amsgrad", "centered", "initial_accumulator_value"} {
		value := optimizer.get(name)
		if value.raw == nil {
			continue
		}
		if name == "momentum" {
			value = unpack(map[bool][]byte{false: {0xc2}, true: {0xc3}}[momentum > 0])
		}
		if value.is(true) && name != "nesterov" {
			state++
		}
		n, options = n+1, append(append(options, text(name)...), value.raw...)
	}
	kind, transforms := optimizer.get("kind"), []byte{0x90 | byte(len(optimizer.get("transforms").list()))}
	for _, one := range optimizer.get("transforms").list() {
		transforms = append(transforms, one.get("kind").raw...)
	}
	made["optimizer"] = bytes.Join([][]byte{{0x83}, text("kind"), kind.raw, text("options"), {0x80 | n}, options, text("transforms"), transforms}, nil)
	algorithm, buckets := number(1), number(256)
	if given := d.get("init_algorithm").raw; given != nil {
		algorithm = given
	}
	if given := d.get("n_buckets").raw; given != nil {
		buckets = given
	}
	made["initializer"] = bytes.Join([][]byte{{initializer.raw[0] + 1}, initializer.body, text("algorithm"), algorithm}, nil)
	made["n_buckets"] = buckets
	identity, pairs := []byte{0x80}, []byte{}
	for _, name := range []string{"name", "dim", "dtype", "id_dtype", "optimizer", "initializer", "seed", "reduce", "life", "n_buckets"} {
		if made[name] != nil {
			identity[0]++
			pairs = append(append(pairs, text(name)...), made[name]...)
		}
	}
	name, dim := d.get("name").text(), int(d.get("dim").number())
	t := table{dtype: d.get("dtype").text(), bits: bits.TrailingZeros64(unpack(buckets).number()), dim: dim, width: 2}
	t.schema, t.checkKey = digest64("schema", append(identity, pairs...))&255, digest64("id check", name)
	tag := digest64("table tag", name, int(d.get("tag_attempt").number()))
	t.tag = string([]byte{alphabet[tag>>58&63], alphabet[tag>>52&63], alphabet[tag>>46&63]})
	if t.dtype == "float32" {
		t.width = 4
	}
	t.sizeBytes = 12 + dim*(t.width+4*state)
	if kind.text() == "rowwise_adagrad" {
		t.sizeBytes = 12 + dim*t.width + 4
	}
	return t
}

func (t table) place(id uint64) (slot uint64, key, field []byte) {
	bucket := mix64(id) >> (64 - t.bits)
	if t.bits <= 14 {
		slot = bucket << (14 - t.bits)
	} else {
		slot = bucket >> (t.bits - 14)
	}
	key = []byte(t.tag + "{" + slotTags[slot] + "}")
	if t.bits > 14 {
		sub := bucket & (1<<(t.bits-14) - 1)
		key = append(key, alphabet[sub>>12], alphabet[sub>>6&63], alphabet[sub&63])
	}
	return slot, key, binary.LittleEndian.AppendUint64(nil, id)
}

func (t table) row(record []byte) (row []byte) { // its float32 values, least significant byte first
	for data := record[12 : 12+t.dim*t.width]; len(data) > 0; data = data[t.width:] {
		var word uint32
		switch t.dtype {
		case "float32":
			word = binary.LittleEndian.Uint32(data)
		case "bfloat16":
			word = uint32(binary.LittleEndian.Uint16(data)) << 16
		default:
			half := binary.LittleEndian.Uint16(data)
			exponent, fraction := int(half>>10&31), float64(half&1023)
			value := math.Ldexp(fraction, -24)
			if exponent > 0 {
				value = math.Ldexp(1024+fraction, exponent-25)
			}
			if exponent == 31 {
				value = map[bool]float64{false: math.Inf(1), true: math.NaN()}[fraction > 0]
			}
			word = math.Float32bits(float32(math.Copysign(value, 1-2*float64(half>>15))))
		}
		row = binary.LittleEndian.AppendUint32(row, word)
	}
	return row
}

type node struct {
	address                    string
	link                       redis.Conn
	info, marker, maps, tables []byte
	err                        error
}

type reader struct {
	seeds, order    []string
	name            string
	nodes           map[string]*node
	deadline        time.Time
	cluster, marker item // the map, and a marker of the cluster
	owners          [16384]uint64
	placements      map[[2]uint64]bool // serial and digest
	table           table
}

func (r *reader) forget() {
	for _, one := range r.nodes {
		if one.link != nil {
			one.link.Close()
		}
	}
	r.nodes, r.order = map[string]*node{}, nil
}

func (r *reader) left() time.Duration {
	return time.Duration(math.Max(float64(time.Until(r.deadline)), float64(time.Millisecond)))
}

func (r *reader) opened(address string) *node { // marker, map and registry are read, and judged where they are used
	if found := r.nodes[address]; found != nil {
		return found
	}
	one, patience := &node{address: address}, r.left()/2 // a node that hangs leaves time for the others
	r.nodes[address], r.order = one, append(r.order, address)
	timeouts := []redis.DialOption{redis.DialConnectTimeout(patience), redis.DialReadTimeout(patience), redis.DialWriteTimeout(patience)}
	if one.link, one.err = redis.Dial("tcp", address, timeouts...); one.err != nil {
		one.link = nil
		return one
	}
	one.link.Send("INFO", "server")
	for _, name := range []string{"kvemb:marker", "kvemb:map", "kvemb:tables"} {
		one.link.Send("GET", name)
	}
	one.err = one.link.Flush()
	for _, to := range []*[]byte{&one.info, &one.marker, &one.maps, &one.tables} {
		if data, err := redis.Bytes(one.link.Receive()); err == nil {
			*to = data
		} else if err != redis.ErrNil && one.err == nil {
			one.err = err
		}
	}
	return one
}

func (r *reader) load() { // the newest map and registry that any node has
	r.cluster, r.marker = item{}, item{}
	var registry item
	for _, address := range r.seeds {
		r.opened(address)
	}
	for i := 0; i < len(r.order); i++ { // which grows: nodes that a map names come behind the seeds
		one := r.nodes[r.order[i]]
		if one.marker != nil && r.marker.raw == nil {
			r.marker = decode(one.marker, "kvemb-marker", 5, 6, 8)
		}
		if one.tables != nil {
			if it := decode(one.tables, "kvemb-tables", 1, 2, 4); registry.raw == nil || it.at(2).number() > registry.at(2).number() {
				registry = it
			}
		}
		if one.maps == nil {
			continue
		}
		it := decode(one.maps, "kvemb-map", 2, 3, 11)
		if r.cluster.raw == nil || it.at(2).number() > r.cluster.at(2).number() {
			r.cluster = it
		}
		for _, place := range it.at(8).list() {
			if place.at(1).text() != "gone" {
				r.opened(place.at(0).text())
			}
		}
	}
	if r.cluster.raw == nil || r.marker.raw == nil {
		fail(lostNode, "no node that answers has a marker, or a cluster map")
	}
	serial, nodes, shards, plan := r.cluster.at(3).number(), r.cluster.at(5), r.cluster.at(7), r.cluster.at(10).list()
	for runs := nodes.bytes(); len(runs) >= 4; runs = runs[4:] {
		for slot := int(binary.LittleEndian.Uint16(runs)); slot < len(r.owners); slot++ {
			r.owners[slot] = uint64(binary.LittleEndian.Uint16(runs[2:]))
		}
	}
	r.placements = map[[2]uint64]bool{}
	name := func(serial uint64, nodes, shards item) {
		packed := bytes.Join([][]byte{{0x93}, number(serial), nodes.raw, shards.raw}, nil)
		r.placements[[2]uint64{serial, digest64("cluster map", packed)}] = true
	}
	name(serial, nodes, shards)
	if plan != nil && (plan[1].text() == "flipped" || plan[1].text() == "serving") { // the plan has the former owners
		if plan[0].text() == "nodes" {
			name(serial-1, plan[2], shards)
		} else {
			name(serial-1, nodes, plan[2])
		}
	}
	if registry.raw != nil {
		for _, definition := range registry.at(3).list() {
			if definition.get("name").text() == r.name {
				r.table = newTable(definition)
				return
			}
		}
	}
	fail(wrongRecord, "there is no table %s", r.name)
}

func (r *reader) judge(one *node, found []byte, number uint64) { // may rows of node `number` be taken from there?
	if one.err != nil {
		fail(lostNode, "node %s: %v", one.address, one.err)
	}
	if found == nil {
		fail(lostNode, "node %s: its marker is gone: the server was emptied, and its rows are lost there", one.address)
	}
	marker := decode(found, "kvemb-marker", 5, 6, 8)
	if !bytes.Equal(marker.at(2).bytes(), r.marker.at(2).bytes()) || marker.at(3).number() != number {
		fail(lostNode, "node %s: is not node %d", one.address, number)
	}
	if serial := marker.at(6).number(); !r.placements[[2]uint64{serial, marker.at(5).number()}] {
		fail(staleMap, "node %s follows serial %d, this program %d", one.address, serial, r.cluster.at(3).number())
	}
	if !bytes.Equal(marker.at(4).bytes(), r.marker.at(4).bytes()) {
		fail(lostNode, "node %s: was emptied and provisioned again", one.address)
	}
	if len(marker.list()) > 9 && marker.at(9).is(true) {
		fail(lostNode, "node %s: its rows are being brought back", one.address)
	}
	if !bytes.Contains(one.info, []byte("run_id:"+marker.at(7).text())) {
		fail(lostNode, "node %s: was started again, its rows may be old", one.address)
	}
}

func (r *reader) nodeOf(number uint64) *node { // proven by its marker, else where the map says
	var found *node
	for _, address := range r.order {
		if one := r.nodes[address]; found == nil && one.marker != nil {
			marker := decode(one.marker, "kvemb-marker", 5, 6, 8)
			if marker.at(3).number() == number && bytes.Equal(marker.at(2).bytes(), r.marker.at(2).bytes()) {
				found = one
			}
		}
	}
	if found == nil {
		if places := r.cluster.at(8).list(); uint64(len(places)) > number {
			found = r.opened(places[number].at(0).text())
		} else {
			fail(lostNode, "node %d: it is not at any of these addresses", number)
		}
	}
	r.judge(found, found.marker, number)
	return found
}

func (r *reader) received(one *node) []byte {
	data, err := redis.Bytes(redis.ReceiveWithTimeout(one.link, r.left()))
	if err != nil && err != redis.ErrNil {
		fail(lostNode, "node %s: %v", one.address, err)
	}
	return data
}

func (r *reader) pull(ids []uint64) [][]byte { // nil: there is no such row
	asked, where, rows := map[uint64]*node{}, make([]*node, len(ids)), make([][]byte, len(ids))
	for i, id := range ids {
		slot, key, field := r.table.place(id)
		number := r.owners[slot]
		if asked[number] == nil {
			asked[number] = r.nodeOf(number)
		}
		where[i] = asked[number]
		where[i].link.Send("HGET", key, field)
	}
	for _, one := range asked {
		one.link.Send("GET", "kvemb:marker")
		if err := one.link.Flush(); err != nil {
			fail(lostNode, "node %s: %v", one.address, err)
		}
	}
	for i := range ids {
		rows[i] = r.received(where[i])
	}
	for number, one := range asked { // the marker was read behind all rows of this connection: it vouches for them
		if found := r.received(one); !bytes.Equal(found, one.marker) {
			r.judge(one, found, number)
			fail(staleMap, "node %s: its marker was renewed", one.address)
		}
	}
	for i, id := range ids {
		word := uint32(mix64(id^r.table.checkKey)>>40<<8 | r.table.schema)
		if rows[i] != nil && (len(rows[i]) != r.table.sizeBytes || binary.LittleEndian.Uint32(rows[i]) != word) {
			fail(wrongRecord, "node %s: the value of id %d is not this row's record", where[i].address, int64(id))
		}
	}
	return rows
}

func (r *reader) try(ids []uint64) (rows [][]byte, err *failure) {
	defer func() {
		if it := recover(); it != nil {
			found := it.(failure)
			err = &found
		}
	}()
	if len(r.nodes) == 0 {
		r.load()
	}
	return r.pull(ids), nil
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: reader HOST:PORT,HOST:PORT TABLE [TIMEOUT_S] < lines of ids")
		os.Exit(2)
	}
	r, timeout := &reader{seeds: strings.Split(os.Args[1], ","), name: os.Args[2], nodes: map[string]*node{}}, 5.0
	if len(os.Args) > 3 {
		timeout, _ = strconv.ParseFloat(os.Args[3], 64)
	}
	lines, out := bufio.NewScanner(os.Stdin), bufio.NewWriter(os.Stdout)
	for lines.Buffer(nil, 1<<24); lines.Scan(); out.Flush() {
		texts, ids := strings.Fields(lines.Text()), []uint64{}
		for _, text := range texts {
			id, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				signed, err := strconv.ParseInt(text, 10, 64)
				if err != nil {
					fmt.Fprintln(os.Stderr, "usage: an id is a number of 64 bits:", err)
					os.Exit(2)
				}
				id = uint64(signed)
			}
			ids = append(ids, id)
		}
		r.deadline = time.Now().Add(time.Duration(timeout * float64(time.Second)))
		rows, err := r.try(ids)
		for nLost := 0; err != nil; rows, err = r.try(ids) {
			over, more := time.Now().After(r.deadline) || err.why != staleMap && nLost > 0, "; reading the map again"
			if over {
				more = ""
			} else if err.why != staleMap {
				nLost++
			}
			fmt.Fprintf(os.Stderr, "%s: %s%s\n", err.why, err.what, more)
			r.forget()
			if over {
				os.Exit(codes[err.why])
			}
			time.Sleep(20 * time.Millisecond)
		}
		for i, record := range rows {
			if record == nil {
				fmt.Fprintf(out, "{\"id\": %s, \"missing\": true}\n", texts[i])
				continue
			}
			version := binary.LittleEndian.Uint64(record[4:])
			row := hex.EncodeToString(r.table.row(record))
			fmt.Fprintf(out, "{\"id\": %s, \"epoch\": %d, \"k\": %d, \"row\": \"%s\"}\n", texts[i], version>>48, version<<16>>16, row)
		}
	}
}
