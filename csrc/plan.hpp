// Writing the plan of a call as JSON, and the counts that plans of all devices share.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "validate.hpp"

namespace flash_cute {

class JsonObject {
 public:
  JsonObject& add(char const* key, std::string const& text) { return add_raw(key, '"' + text + '"'); }
  JsonObject& add(char const* key, char const* text) { return add(key, std::string(text)); }
  template <class Number>
  JsonObject& add(char const* key, Number number) {
    std::ostringstream text;
    text.precision(9);
    text << number;
    return add_raw(key, text.str());
  }
  JsonObject& add(char const* key, std::optional<int64_t> number) {
    return number ? add(key, *number) : add_raw(key, "null");
  }
  JsonObject& add(char const* key, std::vector<std::string> const& texts) {
    std::string list;
    for (std::string const& text : texts) list += (list.empty() ? "\"" : ", \"") + text + '"';
    return add_raw(key, '[' + list + ']');
  }
  JsonObject& add_raw(char const* key, std::string const& json) {
    body_ += (body_.empty() ? "\"" : ", \"") + std::string(key) + "\": " + json;
    return *this;
  }
  std::string text() const { return '{' + body_ + '}'; }

 private:
  std::string body_;
};

// What any device has to do for this problem: 4 FLOPs a head_dim element of every visible pair; every input
// read once and every output written once.
inline JsonObject& add_problem(JsonObject& plan, AttentionProblem const& problem) {
  ProblemShape const& shape = problem.shape;
  int64_t const sequences = int64_t(shape.batch) * shape.heads_q;
  int64_t const rows =
      2 * sequences * shape.seqlen_q + 2 * int64_t(shape.batch) * shape.heads_kv * shape.seqlen_k;
  return plan.add("head_dim", shape.head_dim)
      .add("flops", 4 * sequences * shape.head_dim * problem.mask().visible_pairs())
      .add("bytes", rows * shape.head_dim * 2 + sequences * shape.seqlen_q * int64_t(sizeof(float)))
      .add("softmax_scale", problem.softmax_scale)
      .add("window_left", problem.window_left)
      .add("window_right", problem.window_right);
}

}  // namespace flash_cute
